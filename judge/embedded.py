"""The embedded judge: quality and style by rule, then by a small embedding model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from judge import quality
from judge.lexicon import Evidence, Lexicon
from judge.measures import Text
from judge.preferences import PreferenceSet
from judge.verdict import NO_STYLE, JudgeError

MARGIN = 1.0
"""Evidence by which the strongest style must lead the next, in a set of exclusive styles."""


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

    @property
    def label_suffix(self) -> str:
        return ""

    def check(self) -> None:
        """JudgeError if a style gives the embedded judge nothing to look for."""
        for style in self.preferences.styles.values():
            if not style.rules:
                raise JudgeError(
                    f"The embedded judge cannot tell the style '{style.name}': give it rules, or "
                    "choose a judge model that reads the rubric, for example zai/glm-4.7."
                )

    def mark(self, request: str, answer: str, style: str, pool: Sequence[str]) -> Opinion:
        """Marks for `answer` to `request`; `style` is preferred among `pool`."""
        text = Text(answer)
        evidence = self._lexicon.evidence(text)
        detected, why = self._style(evidence, style, pool)
        fault = quality.find_fault(
            text,
            request,
            min_words=self.preferences.min_words,
            max_words=self.preferences.max_words,
            num_marker_words=max((e.num_words for e in evidence.values()), default=0),
        )
        if fault is None and not quality.shares_topic_word(text, request):
            fault = "It is not about what was asked."
        return Opinion(
            int(fault is None),
            fault or "Whole, varied sentences on the topic.",
            int(detected == style),
            why,
            detected,
        )

    def _style(
        self, evidence: dict[str, Evidence], style: str, pool: Sequence[str]
    ) -> tuple[str, str]:
        if not self.preferences.exclusive:
            for name in (style, *pool):
                if self._present(name, evidence[name]):
                    return name, f"It is {name}: {_notes(evidence[name])}."
            return NO_STYLE, f"It is not {style}: {_lacks(evidence[style])}."
        ranked = sorted(evidence, key=lambda name: -evidence[name].score)
        best = ranked[0]
        second = evidence[ranked[1]].score if len(ranked) > 1 else 0.0
        if not self._present(best, evidence[best]):
            return NO_STYLE, "No style has enough evidence."
        if evidence[best].score - second < MARGIN:
            return NO_STYLE, f"Between {best} and {ranked[1]}."
        if best not in pool:
            return NO_STYLE, f"It is {best}, which is not in the pool."
        return best, f"It is {best}: {_notes(evidence[best])}."

    def _present(self, name: str, evidence: Evidence) -> bool:
        rules = self.preferences.styles[name].rules
        if evidence.failed_checks:
            return False
        return not (rules.words or rules.patterns) or evidence.score >= rules.threshold


def _notes(evidence: Evidence) -> str:
    return ", ".join(evidence.notes[:6]) or "its measures are within bounds"


def _lacks(evidence: Evidence) -> str:
    return "; ".join(evidence.failed_checks) or "too little evidence"
