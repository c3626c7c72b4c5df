"""The embedding model's part of the embedded judge, and how its weights are fitted.

Three small linear readings of one forward pass: is this prose at all, what style is it
written in, is it about what was asked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from judge.embedding import Array, Embedder, Reading, shared_embedder
from judge.features import Classifier, features, fit_classifier
from judge.lexicon import Lexicon
from judge.measures import Text
from judge.preferences import DATA, PreferenceSet
from judge.verdict import NO_STYLE, JudgeError

PROSE_FILE = DATA / "prose.npz"
PROSE, SALAD = "prose", "salad"

MIN_SENTENCE_WORDS = 6
"""Shorter sentences say too little about a style."""

MIN_EXAMPLES = 2
"""Good examples that a style without rules needs."""


@dataclass(frozen=True)
class SecondStage:
    """What the embedding model adds for one set of styles."""

    embedder: Embedder
    prose: Classifier | None
    styles: Classifier | None
    """Fitted to labelled answers of this set; None if it has no (valid) weights."""
    examples: dict[str, tuple[Array, Array]]
    """For styles without rules: mean layers of their good, and of contrasting, examples."""

    @classmethod
    def load(cls, preferences: PreferenceSet) -> SecondStage | None:
        """None where the embedding package is not installed."""
        embedder = shared_embedder()
        if embedder is None:
            return None
        return cls(
            embedder,
            _prose_classifier(),
            _style_classifier(preferences),
            _example_means(preferences, embedder),
        )

    def example_lead(self, name: str, layers: Array) -> float:
        """How much nearer a text is to the good examples of a style than to the others."""
        good, other = self.examples[name]
        return float(layers @ good - layers @ other)


@cache
def _prose_classifier() -> Classifier | None:
    return read_weights(PROSE_FILE)[0] if PROSE_FILE.is_file() else None


def _style_classifier(preferences: PreferenceSet) -> Classifier | None:
    if preferences.weights is None:
        return None
    classifier, fingerprint = read_weights(preferences.weights)
    if fingerprint != preferences.rules_fingerprint:
        raise JudgeError(
            f"The weights {preferences.weights} were fitted to other rules than those of the "
            f"preference set '{preferences.name}': run python -m judge fit, or remove the file."
        )
    return classifier


def _example_means(
    preferences: PreferenceSet, embedder: Embedder
) -> dict[str, tuple[Array, Array]]:
    wanted = [
        style
        for style in preferences.styles.values()
        if not style.rules and len(style.good) >= MIN_EXAMPLES
    ]
    means = {}
    for style in wanted:
        others = [
            text
            for other in preferences.styles.values()
            if other.name != style.name and preferences.exclusive
            for text in other.good
        ]
        contrast = [*style.bad, *others]
        if contrast:
            means[style.name] = (_mean(embedder, style.good), _mean(embedder, contrast))
    return means


def _mean(embedder: Embedder, texts: Sequence[str]) -> Array:
    layers = np.mean([embedder.read(Text(text).text).style() for text in texts], axis=0)
    return (layers / max(float(np.linalg.norm(layers)), 1e-12)).astype(np.float32)


# -- weights ------------------------------------------------------------------------------


def read_weights(path: Path) -> tuple[Classifier, str]:
    """A classifier and the fingerprint of the rules it was fitted with."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return (
                Classifier(
                    tuple(str(name) for name in stored["classes"]),
                    stored["mean"],
                    stored["scale"],
                    stored["weights"],
                    stored["bias"],
                ),
                str(stored["fingerprint"]),
            )
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise JudgeError(f"The weights {path} cannot be read: {error}.") from None


def write_weights(path: Path, classifier: Classifier, fingerprint: str) -> None:
    """The inverse of `read_weights`."""
    np.savez(
        path,
        classes=np.asarray(classifier.classes),
        mean=classifier.mean,
        scale=classifier.scale,
        weights=classifier.weights,
        bias=classifier.bias,
        fingerprint=np.asarray(fingerprint),
    )


# -- fitting ------------------------------------------------------------------------------

STYLE_L2 = 0.3
PROSE_L2 = 0.3
SHUFFLE_WINDOWS = (4, 12, 1000)
"""Words are shuffled within windows of this size to make texts that are not prose."""


def style_rows(lexicon: Lexicon, reading: Reading, text: Text) -> list[Array]:
    """Features of a whole text, then of each of its sentences of some length."""
    rows = [features(reading.style(), lexicon.evidence(text), text)]
    for start, end in long_sentences(text):
        part = Text(text.text[start:end])
        rows.append(features(reading.style(start, end), lexicon.evidence(part), part))
    return rows


def long_sentences(text: Text) -> list[tuple[int, int]]:
    """Where the sentences of at least MIN_SENTENCE_WORDS stand in a text of several."""
    spans, position = [], 0
    for sentence in text.sentences:
        start = text.text.index(sentence, position)
        position = start + len(sentence)
        if len(Text(sentence).words) >= MIN_SENTENCE_WORDS:
            spans.append((start, position))
    return spans if len(text.sentences) > 1 else []


@dataclass(frozen=True)
class StyleData:
    """Labelled answers as rows: `rows[i][0]` is answer i, the rest its sentences."""

    classes: tuple[str, ...]
    rows: list[list[Array]]
    labels: list[str]

    def fit(self, chosen: Sequence[int] | None = None) -> Classifier:
        """A classifier from the chosen answers and their sentences."""
        picked = range(len(self.labels)) if chosen is None else chosen
        flat = [(row, self.labels[i]) for i in picked for row in self.rows[i]]
        return fit_classifier(
            [row for row, _ in flat], [label for _, label in flat], self.classes, l2=STYLE_L2
        )


def style_data(
    preferences: PreferenceSet, labelled: Sequence[tuple[str, str]], embedder: Embedder
) -> StyleData:
    """Rows of (answer, style) pairs."""
    classes = (*preferences.styles, NO_STYLE)
    missing = sorted(set(classes) - {style for _, style in labelled})
    if missing:
        raise JudgeError(f"No labelled answer has the style '{missing[0]}'.")
    lexicon = Lexicon(preferences)
    rows = []
    for answer, _ in labelled:
        text = Text(answer)
        rows.append(style_rows(lexicon, embedder.read(text.text), text))
    return StyleData(classes, rows, [style for _, style in labelled])


def fit_prose(
    good: Sequence[str], bad: Sequence[str], preferences: PreferenceSet, embedder: Embedder
) -> Classifier:
    """Tells prose from strings of words: `good` answers against themselves shuffled or
    robbed of their short words, strings of the set's own words, and `bad`."""
    chance = random.Random(0)
    salads = list(bad)
    for answer in good:
        words = answer.split()
        for window in SHUFFLE_WINDOWS:
            chunks = [words[i : i + window] for i in range(0, len(words), window)]
            salads.append(" ".join(w for c in chunks for w in chance.sample(c, len(c))))
        salads.append(" ".join(word for word in words if len(word) > 4))
    for style in preferences.styles.values():
        entries = [entry.rstrip("*") for group in style.rules.words for entry in group.any]
        for i in range(10 if len(entries) > 20 else 0):
            joint = (" ", ", ", " and ", " the ", ". ")[i % 5]
            salads.append(joint.join(chance.sample(entries, 16)) + "!")
    texts = [*good, *salads]
    labels = [PROSE] * len(good) + [SALAD] * len(salads)
    rows = [embedder.read(Text(text).text).style() for text in texts]
    return fit_classifier(rows, labels, (PROSE, SALAD), l2=PROSE_L2)


def cross_validate(data: StyleData, groups: Sequence[str], folds: int = 6) -> list[str]:
    """The class of every answer by a classifier that saw no answer of its group."""
    fold_of = {group: i % folds for i, group in enumerate(sorted(set(groups)))}
    seen = [NO_STYLE] * len(groups)
    for fold in range(folds):
        classifier = data.fit([i for i, group in enumerate(groups) if fold_of[group] != fold])
        for i, group in enumerate(groups):
            if fold_of[group] == fold:
                odds = classifier.probabilities(data.rows[i][0])
                seen[i] = max(odds, key=lambda name: odds[name])
    return seen
