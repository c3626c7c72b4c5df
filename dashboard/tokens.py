"""Token ids to text, and text with a shade per token. No streamlit, no torch."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from online_sao.config import home
from online_sao.types import IntArray

Pieces = Callable[[IntArray], list[str]]

# Blue and orange stay apart for every kind of colour blindness; the shade is kept light
# enough for the page's own text colour to stay readable on it, on white and on black.
NEGATIVE, POSITIVE = "0, 114, 178", "230, 119, 0"
DARKEST = 0.5


def find_tokenizer(model: str | None, given: str | None = None) -> Path | None:
    """The tokenizer.json of a model: `given` (file or folder), its folder, or the cache."""
    candidates = [Path(path).expanduser() for path in (given, model) if path]
    cache = home() / "models"
    if model and cache.is_dir():
        made = [path for path in cache.iterdir() if path.name.startswith(f"{model}-")]
        candidates += sorted(made, key=lambda path: -path.stat().st_mtime)
    for path in candidates:
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file() and file.suffix == ".json":
            return file
    return None


def load_pieces(file: Path) -> Pieces | None:
    """A function from token ids to the text each adds; None if the file cannot be used."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the package is missing, or the file is of another kind
        return None

    def pieces(ids: IntArray) -> list[str]:
        found, before = [], ""
        for end in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False)
            if text.endswith("\ufffd") and end < len(ids):
                found.append("")  # half of a character: shown with the token that completes it
                continue
            found.append(text[len(before) :])
            before = text
        return found

    return pieces


def shaded_html(
    pieces: Sequence[str],
    numbers: Sequence[float],
    masked: Sequence[bool],
    *,
    middle: float = 0.0,
    name: str,
) -> str:
    """The text with each token shaded by its number's distance from `middle`."""
    shades = np.nan_to_num(np.asarray(numbers, float) - middle)
    largest = float(np.abs(shades).max()) if len(shades) else 0.0
    spans = []
    for piece, number, shade, is_masked in zip(pieces, numbers, shades, masked, strict=True):
        strength = DARKEST * abs(shade) / largest if largest else 0.0
        color = POSITIVE if shade > 0 else NEGATIVE
        style = f"background:rgba({color}, {strength:.2f});border-radius:3px;"
        title = f"{name} {number:.3f}"
        if is_masked:
            style += "text-decoration:underline wavy;outline:1px dashed currentColor;"
            title += " (masked: outside the trust region)"
        text = html.escape(piece).replace("\n", "⏎<br>")
        spans.append(f'<span style="{style}" title="{html.escape(title)}">{text}</span>')
    return (
        '<div style="line-height:1.9;font-size:1.05rem;white-space:pre-wrap;'
        f'overflow-wrap:anywhere">{"".join(spans)}</div>'
    )
