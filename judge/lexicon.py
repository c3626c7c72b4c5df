"""Evidence for styles, from the words, patterns and checks of a preference set."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from judge.english import FUNCTION_WORDS
from judge.measures import Text
from judge.preferences import PreferenceSet, Rules

MIN_PREFIX = 3
"""Shortest stem before a `*`."""
STRONG = 1.5
"""Weight from which a word is a catchword of its style rather than a word like any other."""


@dataclass
class Evidence:
    """What speaks for one style in one text."""

    score: float = 0.0
    notes: list[str] = field(default_factory=list)
    """The words and pattern notes found, strongest first."""
    failed_checks: list[str] = field(default_factory=list)
    num_words: int = 0
    """Words and phrases of the text that are entries of at least STRONG weight, function
    words (thou, upon) left out."""


class Lexicon:
    """All styles' rules, compiled so that one pass over a text serves them all."""

    def __init__(self, preferences: PreferenceSet):
        self._styles = {name: style.rules for name, style in preferences.styles.items()}
        self._exact: dict[str, list[tuple[str, float]]] = {}
        self._stems: dict[str, list[tuple[str, float]]] = {}
        for name, rules in self._styles.items():
            for group in rules.words:
                for entry in group.any:
                    key = entry.lower().replace("’", "'").strip()
                    table = self._stems if key.endswith("*") else self._exact
                    table.setdefault(key.rstrip("*"), []).append((name, group.weight))
        self._phrase_lengths = sorted({len(k.split()) for k in self._exact if " " in k})
        self._stem_lengths = sorted({len(k) for k in self._stems if len(k) >= MIN_PREFIX})
        self._patterns = [
            (name, re.compile(p.match, 0 if p.case else re.IGNORECASE), p.weight, p.note or p.match)
            for name, rules in self._styles.items()
            for p in rules.patterns
        ]

    def evidence(self, text: Text) -> dict[str, Evidence]:
        """Evidence for every style of the set."""
        found = {name: Evidence() for name in self._styles}
        hits: dict[tuple[str, str], float] = {}
        for entry, name, weight in self._word_hits(text.words):
            if weight >= STRONG and entry not in FUNCTION_WORDS:
                found[name].num_words += 1
            hits[name, entry] = weight
        for name, pattern, weight, note in self._patterns:
            if pattern.search(text.text):
                hits[name, note] = weight
        for (name, note), weight in sorted(hits.items(), key=lambda hit: (-hit[1], hit[0])):
            found[name].score += weight
            if weight > 0:
                found[name].notes.append(note)
        for name, rules in self._styles.items():
            found[name].failed_checks = failed_checks(rules, text)
        return found

    def _word_hits(self, words: list[str]) -> Iterable[tuple[str, str, float]]:
        exact, stems = self._exact, self._stems
        for i, word in enumerate(words):
            for name, weight in exact.get(word, ()):
                yield word, name, weight
            for length in self._stem_lengths:
                if length > len(word):
                    break
                for name, weight in stems.get(word[:length], ()):
                    yield word[:length] + "*", name, weight
            for length in self._phrase_lengths:
                if i + length > len(words):
                    break
                phrase = " ".join(words[i : i + length])
                for name, weight in exact.get(phrase, ()):
                    yield phrase, name, weight


def failed_checks(rules: Rules, text: Text) -> list[str]:
    """The checks that `text` does not pass, in words."""
    failed = []
    for check in rules.checks:
        value = text.measure(check.measure)
        label = check.measure.replace("_", " ")
        if check.min is not None and value < check.min:
            failed.append(f"{label} {value:g}, at least {check.min:g} needed")
        elif check.max is not None and value > check.max:
            failed.append(f"{label} {value:g}, at most {check.max:g} allowed")
    return failed
