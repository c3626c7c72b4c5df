"""What can be counted in a text. Pure functions, no third-party imports."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cached_property

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|\n+")
_BULLET = re.compile(r"^\s*(?:[-*•–—‣▪]|\d{1,2}[.)])\s+\S", re.MULTILINE)
_FIRST_PERSON = {"i", "me", "my", "mine", "myself", "i'm", "i've", "i'd", "i'll"}
_SECOND_PERSON = {"you", "your", "yours", "yourself", "you're", "you've", "you'll", "you'd"}
_INVISIBLE = dict.fromkeys(
    [*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF, 0x00AD]
)


def plain(text: str) -> str:
    """`text` with compatibility forms folded (full-width, ligatures, styled letters) and
    invisible characters removed, so that look-alikes cannot hide words."""
    return unicodedata.normalize("NFKC", text).translate(_INVISIBLE)


class Text:
    """A text and its measures, each computed once when asked for."""

    def __init__(self, text: str):
        self.raw = text
        self.text = plain(text)

    @cached_property
    def lowered(self) -> str:
        return self.text.lower().replace("’", "'")

    @cached_property
    def words(self) -> list[str]:
        """Lower-case words."""
        return _WORD.findall(self.lowered)

    @cached_property
    def sentences(self) -> list[str]:
        parts = (part.strip() for part in _SENTENCE_END.split(self.text))
        return [part for part in parts if _WORD.search(part)]

    def measure(self, name: str) -> float:
        """One of preferences.MEASURES."""
        return float(_MEASURES[name](self))


def is_emoji(char: str) -> bool:
    code = ord(char)
    return (
        0x1F300 <= code <= 0x1FAFF
        or 0x2600 <= code <= 0x27BF
        or code in (0x2B50, 0x2B55, 0x2665, 0x2661, 0x266A, 0x266B)
    )


def _share(count: int, of: int) -> float:
    return count / of if of else 0.0


def _long_word_share(text: Text) -> float:
    return _share(sum(len(word) >= 9 for word in text.words), len(text.words))


def _lowercase_starts(text: Text) -> int:
    return sum(sentence[:1].islower() for sentence in text.sentences)


_MEASURES: dict[str, Callable[[Text], float]] = {
    "words": lambda t: len(t.words),
    "sentences": lambda t: len(t.sentences),
    "words_per_sentence": lambda t: _share(len(t.words), len(t.sentences)),
    "bullet_lines": lambda t: len(_BULLET.findall(t.text)),
    "exclamation_marks": lambda t: t.text.count("!"),
    "question_marks": lambda t: t.text.count("?"),
    "first_person": lambda t: sum(word in _FIRST_PERSON for word in t.words),
    "second_person": lambda t: sum(word in _SECOND_PERSON for word in t.words),
    "emoji": lambda t: sum(map(is_emoji, t.text)),
    "commas_per_sentence": lambda t: _share(t.text.count(","), len(t.sentences)),
    "long_word_share": _long_word_share,
    "contractions": lambda t: sum("'" in word and not word.endswith("'s") for word in t.words),
    "lowercase_starts": _lowercase_starts,
}
