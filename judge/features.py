"""A text as the row of numbers that the second stage's classifier takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from judge.embedding import STYLE_WIDTH, Array
from judge.lexicon import Evidence
from judge.measures import Text
from judge.preferences import MEASURES

EVIDENCE_CAP = 8.0
MEASURE_CAP = 40.0


def features(layers: Array, evidence: dict[str, Evidence], text: Text) -> Array:
    """Model layers (`Reading.style`), then evidence per style, then measures."""
    found = [min(EVIDENCE_CAP, max(-EVIDENCE_CAP, e.score)) for e in evidence.values()]
    measured = [min(MEASURE_CAP, text.measure(name)) for name in MEASURES]
    return np.concatenate([layers, np.asarray(found + measured, np.float32)])


@dataclass(frozen=True)
class Classifier:
    """Softmax regression on standardised features."""

    classes: tuple[str, ...]
    mean: Array
    scale: Array
    weights: Array
    """(features, classes)"""
    bias: Array

    def probabilities(self, row: Array) -> dict[str, float]:
        """How likely each class is."""
        logits = ((row - self.mean) * self.scale) @ self.weights + self.bias
        odds = np.exp(logits - logits.max())
        return dict(zip(self.classes, (odds / odds.sum()).tolist(), strict=True))


MODEL_SHARE = 1.0
RULE_SHARE = 0.45
"""How strongly the model's layers and the rules' numbers speak before fitting."""


def fit_classifier(
    rows: Any, labels: list[str], classes: tuple[str, ...], *, l2: float = 1.0, steps: int = 1500
) -> Classifier:
    """Softmax regression with an L2 penalty, by accelerated gradient descent from zero: the
    same rows always give the same classifier."""
    x = np.asarray(rows, np.float64)
    mean, spread = x.mean(axis=0), x.std(axis=0)
    share = np.full(x.shape[1], RULE_SHARE / np.sqrt(max(1, x.shape[1] - STYLE_WIDTH)))
    share[:STYLE_WIDTH] = MODEL_SHARE / np.sqrt(STYLE_WIDTH)
    scale = share / np.maximum(spread, 1e-6) * (spread > 1e-6)
    z = (x - mean) * scale
    target = np.eye(len(classes))[[classes.index(label) for label in labels]]
    weight_of = len(labels) / (len(classes) * np.maximum(target.sum(axis=0), 1))
    importance = (target @ weight_of)[:, None]
    weights, bias = np.zeros((x.shape[1], len(classes))), np.zeros(len(classes))
    ahead_w, ahead_b = weights, bias
    lipschitz = 0.5 * (np.linalg.norm(z, 2) ** 2 + len(z)) * float(importance.max()) + l2
    for step in range(1, steps + 1):
        logits = z @ ahead_w + ahead_b
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        residual = (odds / odds.sum(axis=1, keepdims=True) - target) * importance
        new_w = ahead_w - (z.T @ residual + l2 * ahead_w) / lipschitz
        new_b = ahead_b - residual.sum(axis=0) / lipschitz
        momentum = (step - 1) / (step + 2)
        ahead_w = new_w + momentum * (new_w - weights)
        ahead_b = new_b + momentum * (new_b - bias)
        weights, bias = new_w, new_b
    return Classifier(
        classes,
        mean.astype(np.float32),
        scale.astype(np.float32),
        weights.astype(np.float32),
        bias.astype(np.float32),
    )
