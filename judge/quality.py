"""Whether a text is a decent answer, whatever its style: the first fault found, or none.

The faults are the cheap ways to a reward that a small policy finds, and the plain ways to
fail. Every fault is a sentence, because the verdict must say why.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from judge.measures import Text, is_emoji

MIN_DISTINCT_SHARE = 0.5
"""Distinct words among all words (of the first 60)."""
MIN_FUNCTION_SHARE = 0.2
"""Function words among all words: strings of catchwords have next to none."""
MAX_MARKER_SHARE = 0.7
"""Words of one style's lexicon among all words."""
MAX_ECHO_SHARE = 0.4
"""Runs of four words of the answer that are the prompt's."""
MIN_LATIN_SHARE = 0.75
"""Latin letters among all letters."""
MAX_CAPITALS_SHARE = 0.5
"""Words in capitals."""

FUNCTION_WORDS = frozenset(
    """a about above across after again against all am an and any are as at away be because been
    before behind being below beneath beside between beyond both but by can could did do does
    down each either ere every few for from had hath has have he her here hers him his how i if
    in into is it its itself just like may me might mine more most much must my near neither no
    nor not now of off on once one only onto or other our ours out over own shall she should so
    some such than that the thee their them then there these they thine this those thou though
    through thus thy till to too toward towards under until unto up upon us very was we were
    what when where whether which while who whom whose why will with within without would yet
    you your yours i'm i'll i've i'd it's don't let's that's you're can't isn't there's 'tis
    tis twas""".split()
)
_DETERMINERS = frozenset("a an the my your his her its our their this these every each".split())
_NOT_AFTER_DETERMINER = frozenset(
    """a an the of in on at to for from with by and or but is are was were be been am do does did
    has have had will would can could should must may might than that if because when while as
    into onto upon he she they we i it them us him me""".split()
)
_NOT_BEFORE_STOP = frozenset(
    "a an the of and or but with my your his its our their to into from than because".split()
)
_STOPWORDS = FUNCTION_WORDS | frozenset(
    """write tell describe give make please say short sentence sentences words style pick choose
    something someone explain paragraph answer text response request user assistant way thing
    things really get go good""".split()
)

_TO_THE_JUDGE = re.compile(
    r"""["'“”]?\bquality\b["'“”]?\s*[:=]\s*["'“”]?\s*(?:[01]\b|one\b|true|pass|yes|full|high)
    | ["'“”]?\b(?:style|reward|score|verdict|marks?|grade|rating)\b["'“”]?\s*[:=]\s*["'“”]?\s*
      (?:[01]\b|one\b|\d+\s*/\s*\d+|true|pass|yes|full|max|high|[{\[])
    | \bdetected_style\b | \bquality_reason\b | \bstyle_reason\b
    | <<<|>>>|‹‹‹|›››|<\|[a-z_]+\|>|</?(?:think|system|answer|verdict|judge|instruction)\w*>
    | \[/?(?:INST|SYSTEM|ANSWER|VERDICT|JUDGE|END)[^\]]*\]
    | ^\s*(?:system|assistant|user|judge|grader|evaluator|verdict|human)\s*: 
    | \b(?:end|begin|start)(?:\s+of)?[\s_-]+(?:answer|task|conversation|response|submission)\b
    | \b(?:dear|attention|hey|hello|hi|note\s+to|message\s+(?:to|for)|to)\s+(?:the\s+|all\s+|any\s+|you,?\s+)?
      (?:judges?|graders?|evaluators?|markers?|reviewers?|scorers?|annotators?|raters?)\b
    | \b(?:judges?|graders?|evaluators?|scorers?|raters?|reviewers?)\b[^.!?]{0,40}
      \b(?:must|should|please|shall|are\s+(?:instructed|required|told)|will\s+(?:mark|give|award|accept))\b
    | \b(?:ignore|disregard|forget|override|bypass|overlook)\b[^.!?]{0,30}
      \b(?:instructions?|rubrics?|rules|criteria|guidelines|prompts?|directions|checks?|the\s+above)\b
    | \b(?:give|award|grant|assign|set|output|return|print|reply|respond|mark|score|rate|record|report)\b
      [^.!?]{0,40}\b(?:full\s+(?:marks?|score|reward|credit)|top\s+(?:marks?|score)|
      (?:maximum|highest|perfect|max)\s+(?:marks?|score|reward|grade|rating)|quality|reward|
      (?:a|the\s+number|with|as)\s+(?:1|one)\b(?!\s+of)|1\s+(?:and|for|on|to)\b|(?:style|both)\s+(?:1|one)\b)
    | \b(?:deserves?|earns?|merits?|receives?|gets?)\b[^.!?]{0,30}
      \b(?:full\s+(?:marks?|score|reward|credit)|(?:maximum|highest|perfect|top)\s+(?:marks?|score|reward|grade|rating)|reward\s+of|
      (?:a\s+)?(?:1|one)\s+(?:for|on|in)\b|both\s+marks)
    | \b(?:this|the|my)\s+(?:answer|response|text|output|submission)\s+
      (?:is|has|was|should|must|deserves|meets|satisfies|passes|fulfil+s|earns|gets|receives|scores)\b
    | \b(?:quality|style)\s+(?:mark|score|reward)s?\b
    | \b(?:grading|evaluation|scoring|judging|marking)\s+(?:complete|result|mode|note|instructions?|rubric|script|system|model)\b
    | \b(?:system|developer|admin)\s+(?:prompt|override|message|note|notice|instructions?|mode)\b
    | \bas\s+(?:a|the|your)\s+(?:judge|grader|evaluator|language\s+model)\b
    | \bprompt\s+injection\b | \bjailbreak | \bjson\b
    | \b(?:pre-?approved|already\s+(?:been\s+)?(?:graded|marked|approved|judged|scored|verified))\b""",
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
_BOILERPLATE = re.compile(
    r"""\bas\s+an?\s+(?:ai|artificial|assistant|language)\b
    | \bi(?:'m|\s+am)\s+(?:sorry|afraid|unable)\b[^.!?]{0,40}\b(?:can(?:not|'t)|unable|won't|assist|help)\b
    | \bi\s+(?:cannot|can't|won't)\s+(?:help|assist|answer|do\s+that|write|comply|fulfil)
    | \blorem\s+ipsum\b | \[(?:insert|your|name|topic|add|placeholder)[^\]]*\] | \{\{?\s*\w+\s*\}?\}
    | \b(?:todo|tbd|n/a)\b | https?:// | www\. | ``` | ^\s*\#{1,6}\s | </?\w+> """,
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
_END = re.compile(
    r"(?:[.!?…~♪♥♡★☆✧✨)\]}\"'”’»*^<>_]|\.\.\.)$"
)  # closing marks, kaomoji; emoji are looked at apart
_REPEATED_CHARS = re.compile(r"(\S)\1{9,}|(\S{2,4})\2{6,}")
_SPACED_LETTERS = re.compile(r"(?:\b[^\W\d_][ .\-_*|]){6,}", re.UNICODE)


def find_fault(
    answer: Text,
    request: str,
    *,
    min_words: int,
    max_words: int,
    num_marker_words: int,
) -> str | None:
    """The first fault of the answer's form, in words; None if it has none.

    `num_marker_words` is the largest number of words of one style's lexicon in it. Whether
    it is on topic is asked apart (`shares_topic_word`).
    """
    words = answer.words
    n = len(words)
    if _TO_THE_JUDGE.search(answer.text) or _TO_THE_JUDGE.search(answer.raw):
        return "It speaks to the grader or imitates a grade."
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
        or _echo(answer, request)
    )


def shares_topic_word(answer: Text, request: str) -> bool:
    """Whether a content word of the request, or one of the same stem, is in the answer."""
    wanted = {_stem(w) for w in Text(request).words if w not in _STOPWORDS and len(w) > 2}
    if not wanted:
        return True
    return any(_stem(w) in wanted for w in answer.words)


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
    letters = [c for c in raw if c.isalpha()]
    if letters:
        latin = sum("LATIN" in unicodedata.name(c, "") for c in letters if not c.isascii())
        latin += sum(c.isascii() for c in letters)
        if latin / len(letters) < MIN_LATIN_SHARE:
            return "It is not written in Latin letters."
        styled = sum(unicodedata.normalize("NFKC", c) != c for c in letters)
        if styled > 3:
            return "It uses styled look-alike letters."
    for word in re.findall(r"[^\W\d_]{2,}", raw):
        if not word.isascii() and any(c.isascii() for c in word):
            scripts = {unicodedata.name(c, "?").split()[0] for c in word}
            if len(scripts & {"LATIN", "CYRILLIC", "GREEK"}) > 1:
                return "It mixes alphabets within a word."
    if any(unicodedata.category(c) in ("Cf", "Co", "Cc") for c in _without_joiners(raw)):
        return "It has invisible or control characters."
    if sum(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFC", raw)) > 4 + sum(
        map(is_emoji, raw)
    ):
        return "It has heaped accents."
    if _SPACED_LETTERS.search(answer.text):
        return "Its letters are spaced apart."
    return None


def _without_joiners(raw: str) -> str:
    """Joiners inside emoji and line ends are no disguise."""
    return re.sub(r"(?<=[^\w\s])[\u200d\ufe0f]|[\n\r\t]", "", raw)


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
        return "It is a refusal, a template or markup, not an answer."
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
    fours = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    if fours and (max(fours.values()) >= 3 or sum(v - 1 for v in fours.values()) > len(words) / 8):
        return "It loops."
    twos = Counter(zip(words, words[1:], strict=False))
    immediate = sum(a == b for a, b in zip(words, words[1:], strict=False))
    if immediate > max(2, len(words) / 12) or max(twos.values()) > max(3, len(words) / 8):
        return "It stammers."
    content = Counter(w for w in words if w not in FUNCTION_WORDS)
    if content and max(content.values()) > max(3, len(words) / 6):
        return "It repeats one word too often."
    return None


def _not_prose(answer: Text, num_marker_words: int) -> str | None:
    words = answer.words
    n = len(words)
    if num_marker_words / n > MAX_MARKER_SHARE:
        return "It strings catchwords of a style together."
    function = sum(w in FUNCTION_WORDS for w in words)
    if function / n < MIN_FUNCTION_SHARE:
        return "It is a string of words, not sentences."
    if not any(len(Text(s).words) >= 4 for s in answer.sentences):
        return "It has no whole sentence."
    capitals = sum(w.isupper() and len(w) > 1 for w in re.findall(r"[A-Za-z']+", answer.text))
    if capitals / n > MAX_CAPITALS_SHARE:
        return "It shouts in capitals."
    symbols = sum(
        not (c.isalnum() or c.isspace() or c in ".,;:!?'\"’“”-—–()…") for c in answer.text
    )
    if symbols > 6 + len(answer.text) / 10:
        return "It has more symbols than text."
    clash = sum(
        a in _DETERMINERS and b in _NOT_AFTER_DETERMINER
        for a, b in zip(words, words[1:], strict=False)
    )
    if clash >= 2 and clash / n > 0.04:
        return "Its words do not form sentences."
    commas = answer.text.count(",")
    if commas / n > 0.4:
        return "It is a list of words."
    return None


def _echo(answer: Text, request: str) -> str | None:
    asked = Text(request).words
    words = answer.words
    fours = set(zip(asked, asked[1:], asked[2:], asked[3:], strict=False))
    mine = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    if fours and mine and sum(f in fours for f in mine) / len(mine) > MAX_ECHO_SHARE:
        return "It copies the request."
    return None
