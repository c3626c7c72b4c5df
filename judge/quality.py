"""Whether a text is a decent answer, whatever its style: the first fault found, or none.

The faults are the cheap ways to a reward that a small policy finds, and the plain ways to
fail. Every fault is a sentence, because the verdict must say why.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

from judge.english import FUNCTION_WORDS
from judge.injection import speaks_to_grader
from judge.measures import Text, is_emoji

NOT_LATIN = "It is not written in Latin letters."
NOT_ENGLISH = "Its words are not English."
NOT_SENTENCES = "Its words do not form sentences."
NO_SENTENCE = "It has no whole sentence."
STRING_OF_WORDS = "It is a string of words, not sentences."
LIST_OF_WORDS = "It is a list of words."
BOILERPLATE = "It is a refusal, a template or markup, not an answer."
NO_PROSE = frozenset(
    (
        NOT_LATIN,
        NOT_ENGLISH,
        NOT_SENTENCES,
        NO_SENTENCE,
        STRING_OF_WORDS,
        LIST_OF_WORDS,
        BOILERPLATE,
    )
)
"""Faults of a text that is no prose at all, and so has no style either."""

MIN_DISTINCT_SHARE = 0.5
"""Distinct words among all words (of the first 60)."""
MIN_FUNCTION_SHARE = 0.16
"""Function words among all words: strings of catchwords have next to none."""
MAX_MARKER_SHARE = 0.4
"""Catchwords of one style (lexicon.STRONG) among all words."""
MAX_ECHO_SHARE = 0.4
"""Runs of four words of the answer that are the prompt's."""
MIN_LATIN_SHARE = 0.75
"""Latin letters among all letters."""
MAX_CAPITALS_SHARE = 0.5
"""Words in capitals."""
MAX_LOOSE_ACCENTS = 4
"""Accents that stand on no letter of their own (emoji may have one each)."""

_DETERMINER = "a an the my your its our their every"
_CLASHING = """
a an the of in on at to for from with by and or but is are was were be been am do does did has
have had will would can could should must may might than that if because when while as into onto
upon he she they we i it them us him me
"""
_DANGLING = "a an the and or but my your its our their than because"
_ASKING = """
write tell describe give make please say short sentence sentences words style pick choose select
something someone explain paragraph answer text response request user assistant way thing things
really get go good lines few line
"""
_DETERMINERS = frozenset(_DETERMINER.split())
_NOT_AFTER_DETERMINER = frozenset(_CLASHING.split())
_NOT_BEFORE_STOP = frozenset(_DANGLING.split())
_STOPWORDS = FUNCTION_WORDS | frozenset(_ASKING.split())

_BOILERPLATE = re.compile(
    r"""\bas\s+an?\s+(?:ai|artificial|assistant|language)\b
    | \bi(?:'m|\s+am)\s+(?:sorry|afraid|unable)\b[^.!?]{0,40}
      \b(?:can(?:not|'t)|unable|won't|assist|help)\b
    | \bi\s+(?:cannot|can't|won't)\s+(?:help|assist|answer|do\s+that|write|comply|fulfil)
    | \b(?:could|can|would)\s+you\s+(?:please\s+)?(?:clarify|specify|rephrase|provide|elaborate)
    | \bplease\s+(?:clarify|specify|rephrase|provide)\b
    | \bwhat\s+would\s+you\s+like\s+me\s+to\b | \bhow\s+(?:can|may)\s+i\s+(?:help|assist)\b
    | \bi\s+(?:don't|do\s+not)\s+know\s+(?:anything|what\s+to\s+(?:say|write))
    | \blorem\s+ipsum\b | \[(?:insert|your|name|topic|add|placeholder)[^\]]*\] | \{\{?\s*\w+\s*\}?\}
    | \b(?:todo|tbd|n/a)\b | <!--
    | [-=_*]{4,} | \b(?=\w*\d)(?=\w*[a-z])[\w+/=]{24,}
    | https?:// | www\. | ``` | ^\s*\#{1,6}\s | </?\w+> """,
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
_END = re.compile(
    r"(?:[.!?…~♪♥♡★☆✧✨)\]}\"'”’»*^<>_]|\.\.\.)$"
)  # closing marks, kaomoji; emoji are looked at apart
_HIDDEN = re.compile(
    # invisible characters beside a letter (joiners inside emoji and little faces are no
    # disguise), direction overrides and control characters anywhere
    "(?<=[^\\W_])[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]"
    "|[\u202a-\u202e\u2066-\u2069\ufff0-\ufff8\ue000-\uf8ff]"
    "|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_REPEATED_CHARS = re.compile(r"(\S)\1{9,}|(\S{2,4})\2{6,}")
_SPACED_LETTERS = re.compile(r"(?:\b[^\W\d_][ .\-_*|]){6,}", re.UNICODE)


@dataclass(frozen=True)
class Bounds:
    """What of a preference set matters to quality."""

    min_words: int
    max_words: int
    style_names: tuple[str, ...] = ()

    def claims_style(self, text: str) -> str | None:
        """Words by which a text claims a style by name instead of having it."""
        match = _claim(self.style_names).search(text) if self.style_names else None
        return match.group() if match else None


@cache
def _claim(names: tuple[str, ...]) -> re.Pattern[str]:
    name = "(?:" + "|".join(re.escape(n) for n in names) + ")"
    kind = "(?:styles?|tone|voice|register|persona|answer|response|text)"
    return re.compile(
        rf"\b{name}\W{{0,2}}\s{kind}\b|\b{kind}\s*(?:is|was|[:=-])\W*{name}\b"
        rf"|\b(?:selected|chosen|choose|select|picked|detected|in)\W{{1,3}}{name}\W*"
        rf"(?:style\b|[.:;!]|$)|^\W*{name}\W*(?:[:—-]|$)|\b(?:very|most|fully|clearly|"
        rf"completely|100\s*%)\s{name}\W*(?:and|,)\W*(?:very|most|fully|clearly)\b",
        re.IGNORECASE | re.MULTILINE,
    )


def find_fault(
    answer: Text, conversation: Sequence[str], bounds: Bounds, num_marker_words: int
) -> str | None:
    """The first fault of the answer's form, in words; None if it has none.

    `conversation` are the texts that it must not copy, `num_marker_words` the largest
    number of words of one style's lexicon in it. Whether it is on topic is asked apart
    (`shares_topic_word`).
    """
    words = answer.words
    n = len(words)
    min_words, max_words = bounds.min_words, bounds.max_words
    if to_grader := speaks_to_grader(answer.text) or bounds.claims_style(answer.text):
        return f"It speaks to the grader or imitates a grade: '{to_grader}'."
    if n < min_words:
        return f"It has {n} words, fewer than {min_words}."
    if n > max_words:
        return f"It has {n} words, more than {max_words}."
    return (
        _disguised(answer)
        or _not_finished(answer)
        or _boilerplate(answer)
        or _repetitive(answer)
        or _not_prose(answer, num_marker_words)
        or _echo(answer, conversation)
    )


def content_words(request: str) -> str:
    """What a request is about: its words without those that only ask."""
    return " ".join(w for w in Text(request).words if w not in _STOPWORDS and len(w) > 2)


def shares_topic_word(answer: Text, request: str) -> bool:
    """Whether a content word of the request, or one of the same stem, is in the answer."""
    wanted = {_stem(word) for word in content_words(request).split()}
    return not wanted or any(_stem(word) in wanted for word in answer.words)


def _stem(word: str) -> str:
    word = word.removesuffix("'s")
    for ending in ("ingly", "ingness", "iness", "ings", "ing", "ies", "ied", "est", "eth", "ers"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: len(word) - len(ending)].rstrip("eiy")[:6]
    for ending in ("ly", "es", "ed", "er", "s", "y", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: len(word) - len(ending)].rstrip("eiy")[:6]
    return word[:6]


def _disguised(answer: Text) -> str | None:
    raw = answer.raw
    if _HIDDEN.search(raw):
        return "It has invisible or control characters within words."
    if _SPACED_LETTERS.search(answer.text):
        return "Its letters are spaced apart."
    if raw.isascii():
        return None
    letters = [c for c in raw if c.isalpha()]
    latin = sum(c.isascii() or "LATIN" in unicodedata.name(c, "") for c in letters)
    if letters and latin / len(letters) < MIN_LATIN_SHARE:
        return NOT_LATIN
    if sum(not c.isascii() and unicodedata.normalize("NFKC", c) != c for c in letters) > 3:
        return "It uses styled look-alike letters."
    for word in re.findall(r"[^\W\d_]{2,}", raw):
        if not word.isascii():
            scripts = {unicodedata.name(c, "?").split()[0] for c in word}
            if len(scripts & {"LATIN", "CYRILLIC", "GREEK"}) > 1:
                return "It mixes alphabets within a word."
    marks = sum(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFC", raw))
    if marks > MAX_LOOSE_ACCENTS + sum(map(is_emoji, raw)):
        return "It has heaped accents."
    return None


def _not_finished(answer: Text) -> str | None:
    end = answer.text.rstrip()
    if not end:
        return "It is empty."
    if not (_END.search(end) or is_emoji(end[-1]) or end[-1] == "\ufe0f"):
        return "It breaks off in the middle of a sentence."
    tail = re.sub(r"[^\w']+$", "", end.lower()).rsplit(None, 1)
    if tail and tail[-1] in _NOT_BEFORE_STOP and not end.endswith(("...", "…")):
        return "Its last sentence has no end."
    return None


def _boilerplate(answer: Text) -> str | None:
    if _BOILERPLATE.search(answer.text):
        return BOILERPLATE
    return None


def _repetitive(answer: Text) -> str | None:
    if _REPEATED_CHARS.search(answer.text):
        return "It repeats characters without end."
    words = answer.words
    head = words[:60]
    if len(set(head)) / len(head) < MIN_DISTINCT_SHARE:
        return "It says the same words over and over."
    sentences = [" ".join(re.findall(r"\w+", s.lower())) for s in answer.sentences]
    long = [s for s in sentences if s.count(" ") >= 2]
    if len(long) != len(set(long)):
        return "It repeats a sentence."
    fours = Counter(_fours(words))
    if fours and (max(fours.values()) >= 3 or sum(v - 1 for v in fours.values()) > len(words) / 8):
        return "It loops."
    twos = Counter(pairwise(words))
    immediate = sum(a == b for a, b in pairwise(words))
    if immediate > max(4, len(words) / 8) or max(twos.values()) > max(3, len(words) / 8):
        return "It stammers."
    content = Counter(w for w in words if w not in FUNCTION_WORDS)
    if content and max(content.values()) > max(4, len(words) / 6):
        return "It repeats one word too often."
    return None


def _not_prose(answer: Text, num_marker_words: int) -> str | None:
    words = answer.words
    n = len(words)
    if num_marker_words / n > MAX_MARKER_SHARE:
        return "It strings catchwords of a style together."
    function = sum(w in FUNCTION_WORDS for w in words)
    if function / n < MIN_FUNCTION_SHARE:
        return STRING_OF_WORDS
    if not any(len(Text(s).words) >= 4 for s in answer.sentences):
        return NO_SENTENCE
    capitals = sum(w.isupper() and len(w) > 1 for w in re.findall(r"[A-Za-z']+", answer.text))
    if capitals / n > MAX_CAPITALS_SHARE:
        return "It shouts in capitals."
    symbols = sum(
        not (c.isalnum() or c.isspace() or c in ".,;:!?'\"’“”-—–()…") for c in answer.text
    )
    if symbols > 6 + len(answer.text) / 10:
        return "It has more symbols than text."
    clash = sum(a in _DETERMINERS and b in _NOT_AFTER_DETERMINER for a, b in pairwise(words))
    if clash >= 2 and clash / n > 0.04:
        return NOT_SENTENCES
    commas = answer.text.count(",")
    if commas / n > 0.4:
        return LIST_OF_WORDS
    return None


def _echo(answer: Text, conversation: Sequence[str]) -> str | None:
    mine = _fours(answer.words)
    for said in conversation if mine else ():
        theirs = _fours_said(said)
        if theirs and sum(four in theirs for four in mine) / len(mine) > MAX_ECHO_SHARE:
            return "It copies what was said before."
    return None


@lru_cache(maxsize=64)
def _fours_said(text: str) -> frozenset[tuple[str, ...]]:
    return frozenset(_fours(Text(text).words))


def _fours(words: list[str]) -> list[tuple[str, ...]]:
    return list(zip(words, words[1:], words[2:], words[3:], strict=False))
