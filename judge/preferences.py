"""Preferences as data: sets of styles, read from TOML (docs/judge.md shows how to add one)."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from judge.verdict import NO_STYLE, JudgeError

MEASURES = (
    "words",
    "sentences",
    "words_per_sentence",
    "bullet_lines",
    "exclamation_marks",
    "question_marks",
    "first_person",
    "second_person",
    "emoji",
    "commas_per_sentence",
    "long_word_share",
    "contractions",
    "lowercase_starts",
)
"""What a check may measure; computed in judge/measures.py."""


@dataclass(frozen=True)
class Words:
    """Words or phrases, each of which is evidence of `weight` (negative: against).

    A trailing `*` stands for any ending. An entry counts once, however often it occurs.
    """

    any: tuple[str, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Pattern:
    """A regular expression (ignoring case) whose presence is evidence of `weight`."""

    match: str
    weight: float = 1.0
    note: str = ""
    case: bool = False
    """True: upper and lower case matter."""


@dataclass(frozen=True)
class Check:
    """A measure of the answer that must lie within bounds, or the style is not there."""

    measure: str
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True)
class Rules:
    """What the embedded judge looks for."""

    words: tuple[Words, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    checks: tuple[Check, ...] = ()
    threshold: float = 2.0
    """Evidence needed, if there are words or patterns."""

    def __bool__(self) -> bool:
        return bool(self.words or self.patterns or self.checks)


@dataclass(frozen=True)
class Style:
    """One style a preference can ask for."""

    name: str
    description: str
    earns_style: str
    """When the style mark is 1, in words for an LLM judge."""
    earns_quality: str
    """When the quality mark is 1."""
    good: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True)
class PreferenceSet:
    """Styles that belong together."""

    name: str
    description: str
    styles: dict[str, Style]
    exclusive: bool = True
    """True: an answer has at most one of these styles (the strongest). False: several."""
    min_words: int = 10
    max_words: int = 160
    """Bounds of an answer's length, for the embedded judge's quality mark."""
    prose: bool = True
    """False: answers in these styles need not be prose (telegrams, code, tables), so the
    embedded judge does not ask for it."""
    weights: Path | None = field(default=None, compare=False)
    """Weights fitted to this set for the embedded judge (`python -m judge fit`), if any."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the whole content: part of every cache key."""
        content = asdict(self)
        content.pop("weights")
        return _hash(content)

    @cached_property
    def rules_fingerprint(self) -> str:
        """Hash of what fitted weights depend on."""
        rules = {name: asdict(style.rules) for name, style in self.styles.items()}
        return _hash([list(rules), rules, MEASURES])


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


DATA = Path(__file__).parent / "data"


def shipped_sets() -> tuple[str, ...]:
    """Names of the sets in this package."""
    return tuple(sorted(path.stem for path in DATA.glob("*.toml")))


def load_preferences(name_or_path: str | Path) -> PreferenceSet:
    """A shipped set by its name, or a TOML file by its path. JudgeError says what is wrong.

    Weights for the embedded judge are taken from a file of the same name that ends in .npz.
    """
    text = str(name_or_path)
    if text in shipped_sets():
        path, where = DATA / f"{text}.toml", f"the shipped set '{text}'"
    else:
        path = Path(name_or_path).expanduser()
        where = str(path)
        if path.suffix != ".toml" and not path.exists():
            raise JudgeError(
                f"Unknown preference set '{text}'; shipped are {', '.join(shipped_sets())}. "
                "For your own, give the path of a TOML file."
            )
    try:
        source = path.read_text("utf-8")
    except FileNotFoundError:
        raise JudgeError(f"There is no preference file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"The preference file {path} cannot be read: {error}.") from None
    preferences = parse_preferences(source, where=where, default_name=path.stem)
    weights = path.with_suffix(".npz")
    return replace(preferences, weights=weights) if weights.is_file() else preferences


def parse_preferences(
    toml_text: str, *, where: str = "preferences", default_name: str = "custom"
) -> PreferenceSet:
    """A set from TOML text."""
    try:
        data = tomllib.loads(toml_text)
    except tomllib.TOMLDecodeError as error:
        raise JudgeError(f"{where} is not valid TOML: {error}.") from None
    _known_keys(
        data,
        {
            "name",
            "description",
            "exclusive",
            "prose",
            "earns_quality",
            "min_words",
            "max_words",
            "styles",
        },
        where,
    )
    styles_data = data.get("styles")
    if not isinstance(styles_data, dict) or not styles_data:
        raise JudgeError(f"{where} has no styles: add a table [styles.NAME].")
    shared_quality = _text(data, "earns_quality", where, default=DEFAULT_EARNS_QUALITY)
    styles = {
        name: _style(name, entry, shared_quality, f"{where}, style '{name}'")
        for name, entry in styles_data.items()
    }
    if NO_STYLE in styles:
        raise JudgeError(f"{where}: a style cannot be called '{NO_STYLE}', rename it.")
    low = _number(data, "min_words", where, 10)
    high = _number(data, "max_words", where, 160)
    if not 0 <= low < high:
        raise JudgeError(f"{where}: min_words must be below max_words, not {low:g} and {high:g}.")
    return PreferenceSet(
        name=_text(data, "name", where, default=default_name),
        description=_text(data, "description", where, default=""),
        styles=styles,
        exclusive=_flag(data, "exclusive", where),
        prose=_flag(data, "prose", where),
        min_words=int(low),
        max_words=int(high),
    )


DEFAULT_EARNS_QUALITY = (
    "The answer does what the user asked, stays on the topic, reads as finished, fluent text "
    "in whole sentences, does not repeat itself, and neither copies the request nor lists "
    "stock words of a style without saying anything."
)


def _style(name: str, entry: Any, shared_quality: str, where: str) -> Style:
    if not isinstance(entry, dict):
        raise JudgeError(f"{where} must be a table.")
    _known_keys(
        entry, {"description", "earns_style", "earns_quality", "good", "bad", "rules"}, where
    )
    description = _text(entry, "description", where, default="")
    earns_style = _text(entry, "earns_style", where, default=description)
    if not earns_style:
        raise JudgeError(
            f"{where} has no rubric: write 'description' or 'earns_style' so that a judge "
            "knows what to look for."
        )
    return Style(
        name=name,
        description=description or earns_style,
        earns_style=earns_style,
        earns_quality=_text(entry, "earns_quality", where, default=shared_quality),
        good=_texts(entry, "good", where),
        bad=_texts(entry, "bad", where),
        rules=_rules(entry.get("rules", {}), where),
    )


def _rules(entry: Any, where: str) -> Rules:
    if not isinstance(entry, dict):
        raise JudgeError(f"{where}: rules must be a table.")
    _known_keys(entry, {"words", "patterns", "checks", "threshold"}, f"{where}, rules")
    words, patterns, checks = [], [], []
    for item in _tables(entry, "words", where):
        _known_keys(item, {"any", "weight"}, f"{where}, words")
        words.append(Words(_texts(item, "any", where), _number(item, "weight", where, 1.0)))
    for item in _tables(entry, "patterns", where):
        _known_keys(item, {"match", "weight", "note", "case"}, f"{where}, patterns")
        match = _text(item, "match", where)
        try:
            re.compile(match)
        except re.error as error:
            raise JudgeError(f"{where}: the pattern {match!r} is not valid: {error}.") from None
        patterns.append(
            Pattern(
                match,
                _number(item, "weight", where, 1.0),
                _text(item, "note", where, default=""),
                bool(item.get("case", False)),
            )
        )
    for item in _tables(entry, "checks", where):
        _known_keys(item, {"measure", "min", "max"}, f"{where}, checks")
        measure = _text(item, "measure", where)
        if measure not in MEASURES:
            raise JudgeError(
                f"{where}: unknown measure '{measure}'; there are {', '.join(MEASURES)}."
            )
        if "min" not in item and "max" not in item:
            raise JudgeError(f"{where}: the check of '{measure}' needs min or max.")
        bounds = {k: _number(item, k, where, 0.0) for k in ("min", "max") if k in item}
        checks.append(Check(measure, bounds.get("min"), bounds.get("max")))
    return Rules(
        tuple(words), tuple(patterns), tuple(checks), _number(entry, "threshold", where, 2.0)
    )


def _known_keys(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise JudgeError(
            f"{where}: unknown key '{unknown[0]}'; there are {', '.join(sorted(known))}."
        )


def _text(entry: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str):
        raise JudgeError(f"{where}: '{key}' must be a text.")
    return value.strip()


def _texts(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise JudgeError(f"{where}: '{key}' must be a list of texts.")
    return tuple(value)


def _tables(entry: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise JudgeError(f"{where}: '{key}' must be a list of tables.")
    return value


def _flag(entry: Mapping[str, Any], key: str, where: str) -> bool:
    value = entry.get(key, True)
    if not isinstance(value, bool):
        raise JudgeError(f"{where}: '{key}' must be true or false.")
    return value


def _number(entry: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JudgeError(f"{where}: '{key}' must be a number.")
    return float(value)
