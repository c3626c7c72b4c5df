"""From what a judge wrote to two marks, or to nothing: never to a guess."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from judge.verdict import NO_STYLE

_DECODER = json.JSONDecoder(strict=False)
_TRAILING_COMMA = re.compile(r",\s*([}\]])")


@dataclass(frozen=True)
class Marks:
    """One readable vote."""

    quality: int
    style: int
    detected_style: str
    rationale: str


_OPENING = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_CLOSING = re.compile(r"</think(?:ing)?>", re.IGNORECASE)


def without_thinking(text: str) -> str:
    """`text` after its thinking block. An unclosed block hides all that follows it; a
    closing tag alone (templates that open the block in the prompt) hides all before it.
    Tags inside a JSON object are quotations."""
    quoted = _spans(text) if "<" in text else []
    for tag in _CLOSING.finditer(text):
        if not any(start < tag.start() < end for start, end in quoted):
            return without_thinking(text[tag.end() :])
    for tag in _OPENING.finditer(text):
        if not any(start < tag.start() < end for start, end in quoted):
            return text[: tag.start()]
    return text


def read_marks(text: str, nonce: str, answer: str) -> Marks | None:
    """The last verdict in `text`, or None.

    A verdict that repeats `nonce` beats one without a code. One with another code, and a
    bare one that stands in the answer just so (the judge quoted it), never counts.
    """
    planted = {_canonical(o) for o in json_objects(answer)} if "{" in answer else set()
    bare: Marks | None = None
    coded: Marks | None = None
    for candidate in json_objects(text):
        marks = _marks(candidate)
        if marks is None:
            continue
        code = candidate.get("code")
        if code in (None, ""):
            if _canonical(candidate) not in planted:
                bare = marks
        elif str(code).strip() == nonce:
            coded = marks
    return coded or bare


def ends_in_open_object(text: str) -> bool:
    """Whether an object begins after the last complete one: a later verdict was cut."""
    spans = _spans(text)
    return "{" in text[spans[-1][1] if spans else 0 :]


def json_objects(text: str) -> list[dict[str, Any]]:
    """Every complete outermost JSON object in `text`, in order. A verdict wrapped in
    another object ({"verdict": {...}}) or in a list is found too."""
    found: list[dict[str, Any]] = []
    for start, end in _spans(text):
        value = _load(text[start:end])
        if isinstance(value, dict):
            found += [value, *(inner for inner in value.values() if isinstance(inner, dict))]
    return found


MAX_BRACES = 100
MAX_OBJECT_CHARS = 4_000
"""Bounds of the search, so that a hostile text cannot make it slow."""


def _spans(text: str) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    position = 0
    for _ in range(MAX_BRACES):
        start = text.find("{", position)
        if start < 0:
            break
        end = _object_end(text, start)
        if end is None:
            position = start + 1
        else:
            spans.append((start, end))
            position = end
    return spans


def _object_end(text: str, start: int) -> int | None:
    """Where the object that begins at `start` ends, by counting braces outside strings."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        pass
    depth, in_string, escaped = 0, False, False
    for i in range(start, min(len(text), start + MAX_OBJECT_CHARS)):
        char = text[i]
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                end = i + 1
                return end if _load(text[start:end]) is not None else None
    return None


def _load(text: str) -> Any:
    for attempt in (text, _TRAILING_COMMA.sub(r"\1", text)):
        try:
            return _DECODER.decode(attempt)
        except (ValueError, RecursionError):
            continue
    return None


def _canonical(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _marks(value: dict[str, Any]) -> Marks | None:
    quality, style = _bit(value.get("quality")), _bit(value.get("style"))
    if quality is None or style is None:
        return None
    detected = value.get("detected_style")
    reasons = [
        str(value[key]).strip()
        for key in ("quality_reason", "style_reason", "rationale", "reason")
        if value.get(key)
    ]
    return Marks(
        quality,
        style,
        detected.strip().lower() if isinstance(detected, str) and detected.strip() else NO_STYLE,
        " ".join(reasons),
    )


def _bit(value: Any) -> int | None:
    """0 or 1 as models write it; None for everything else (0.5, 7, "maybe", null)."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float) and value in (0, 1):
        return int(value)
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    return None


_WORDS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1, "no": 0, "yes": 1}
