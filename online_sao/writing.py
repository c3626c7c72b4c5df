"""The writing task: topics, prompts, and styled answers for the warm start.

What is asked comes from a topic set (`data/writing.toml`, or a TOML file of the same form);
styled answers are put together from a phrasebook (`data/phrasebook.toml`). Everything drawn
at random is a function of the seed alone, on every machine.

    topics = load_topics()
    messages = build_messages("making tea", ("academic", "cute", "classical"), seed=0)
    examples = warm_start_examples(320, seed=0)
"""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from online_sao.errors import ConfigError

__all__ = [
    "Example",
    "Phrasebook",
    "StyleParts",
    "Topics",
    "build_messages",
    "load_phrasebook",
    "load_topics",
    "pretraining_prompts",
    "styled_answer",
    "system_prompt",
    "topic_stream",
    "warm_start_examples",
]

DATA = Path(__file__).parent / "data"
POOL_SIZE = 3
"""Styles offered in one system prompt, as in the paper's task."""
TWO_SENTENCE_SHARE = 0.2
"""Share of phrasebook answers that leave out the closing."""


@dataclass(frozen=True)
class Topics:
    """What can be asked. Training and held-out topics do not overlap."""

    name: str
    training: tuple[str, ...]
    heldout: tuple[str, ...]
    system: str
    """Template of the system prompt; `{pool}` becomes the display names of the pool."""
    users: tuple[str, ...]
    """Templates of the user prompt, each with `{topic}`."""
    styles: Mapping[str, str]
    """Style key to the name written in prompts, in the file's order."""
    details: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Topic to noun phrases that belong to it; only the phrasebook needs them."""

    def display(self, style: str) -> str:
        """The name of a style as prompts write it."""
        try:
            return self.styles[style]
        except KeyError:
            known = ", ".join(self.styles)
            raise ConfigError(
                f"Unknown style '{style}' in topic set {self.name}; it has {known}."
            ) from None


@dataclass(frozen=True)
class StyleParts:
    """One style's sentences. Openings hold `{topic}`, middles `{detail}` or `{Detail}`."""

    openings: tuple[str, ...]
    middles: tuple[str, ...]
    closings: tuple[str, ...]


Phrasebook = Mapping[str, StyleParts]


@dataclass(frozen=True)
class Example:
    """One supervised example: a prompt, the answer to imitate, and what it was made from."""

    messages: list[dict[str, str]]
    answer: str
    style: str
    pool: tuple[str, ...]
    topic: str


def load_topics(name_or_path: str | Path = "writing") -> Topics:
    """A shipped topic set by name, or a TOML file. ConfigError says what is wrong with it."""
    path = _find(name_or_path, "topic set")
    data = _read(path, "topic set")
    unknown = set(data) - {"system", "users", "styles", "training", "heldout"}
    if unknown:
        raise ConfigError(f"Topic set {path}: unknown setting '{sorted(unknown)[0]}'.")
    system, users = data.get("system"), data.get("users")
    if not isinstance(system, str) or "{pool}" not in system:
        raise ConfigError(f"Topic set {path}: 'system' must be a text that contains {{pool}}.")
    if not _texts(users) or any("{topic}" not in user for user in users):
        raise ConfigError(f"Topic set {path}: 'users' must list texts that contain {{topic}}.")
    styles = data.get("styles")
    if not isinstance(styles, dict) or not styles or not _texts(list(styles.values())):
        raise ConfigError(
            f"Topic set {path}: [styles] must give each style the name it is shown by."
        )
    parts: dict[str, tuple[str, ...]] = {}
    details: dict[str, tuple[str, ...]] = {}
    for part in ("training", "heldout"):
        listed = data.get(part)
        if isinstance(listed, dict):
            for topic, phrases in listed.items():
                if not _texts(phrases):
                    raise ConfigError(f"Topic set {path}: '{topic}' needs a list of details.")
                details[topic] = tuple(phrases)
            listed = list(listed)
        if not _texts(listed):
            raise ConfigError(f"Topic set {path}: '{part}' must name at least one topic.")
        if len(set(listed)) < len(listed):
            raise ConfigError(f"Topic set {path}: '{part}' names a topic twice.")
        parts[part] = tuple(listed)
    shared = set(parts["training"]) & set(parts["heldout"])
    if shared:
        raise ConfigError(
            f"Topic set {path}: '{sorted(shared)[0]}' is both a training and a held-out topic."
        )
    return Topics(
        name=path.stem,
        training=parts["training"],
        heldout=parts["heldout"],
        system=system,
        users=tuple(users),
        styles=dict(styles),
        details=details,
    )


def load_phrasebook(name_or_path: str | Path = "phrasebook") -> dict[str, StyleParts]:
    """A phrasebook by name or file: style key to its sentences."""
    path = _find(name_or_path, "phrasebook")
    book: dict[str, StyleParts] = {}
    for style, table in _read(path, "phrasebook").items():
        if not isinstance(table, dict) or set(table) != {"openings", "middles", "closings"}:
            raise ConfigError(f"Phrasebook {path}: [{style}] needs openings, middles and closings.")
        for part, sentences in table.items():
            if not _texts(sentences):
                raise ConfigError(f"Phrasebook {path}: {style}.{part} must be a list of texts.")
        book[style] = StyleParts(**{part: tuple(texts) for part, texts in table.items()})
    if not book:
        raise ConfigError(f"Phrasebook {path} has no style.")
    return book


def system_prompt(
    pool: Sequence[str], order: random.Random | None = None, *, topics: Topics | None = None
) -> str:
    """The instruction to select one style of `pool`, named in an order drawn from `order`.

    Without `order` the styles are named as `pool` has them.
    """
    topics = topics or _default_topics()
    names = [topics.display(style) for style in pool]
    if order is not None:
        order.shuffle(names)
    return topics.system.replace("{pool}", ", ".join(names))


def build_messages(
    topic: str, pool: Sequence[str], seed: int | str, *, topics: Topics | None = None
) -> list[dict[str, str]]:
    """System and user message for `topic`; wording and order of the pool follow the seed."""
    topics = topics or _default_topics()
    rng = random.Random(f"messages/{seed}/{topic}")
    system = system_prompt(pool, rng, topics=topics)
    user = rng.choice(topics.users).replace("{topic}", topic)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def styled_answer(
    topic: str,
    style: str,
    rng: random.Random,
    *,
    topics: Topics | None = None,
    phrasebook: Phrasebook | None = None,
) -> str:
    """Two or three sentences about `topic` in `style`, put together from the phrasebook."""
    topics = topics or _default_topics()
    book = phrasebook or _default_phrasebook()
    if style not in book:
        raise ConfigError(f"The phrasebook has no style '{style}'; it has {', '.join(book)}.")
    if topic not in topics.details:
        raise ConfigError(f"Topic '{topic}' has no details in topic set {topics.name}.")
    parts, detail = book[style], rng.choice(topics.details[topic])
    sentences = [rng.choice(parts.openings), rng.choice(parts.middles)]
    if rng.random() >= TWO_SENTENCE_SHARE:
        sentences.append(rng.choice(parts.closings))
    filled = " ".join(sentences)
    for slot, text in (
        ("{topic}", topic),
        ("{detail}", detail),
        ("{Detail}", detail[0].upper() + detail[1:]),
    ):
        filled = filled.replace(slot, text)
    return filled


def topic_stream(listed: Sequence[str], seed: int | str) -> Iterator[str]:
    """Topics without end: every pass visits each once, in a new order."""
    for turn in itertools.count():
        deck = list(listed)
        random.Random(f"topics/{seed}/{turn}").shuffle(deck)
        yield from deck


def warm_start_examples(
    count: int,
    seed: int,
    *,
    topics: Topics | None = None,
    phrasebook: Phrasebook | None = None,
) -> list[Example]:
    """`count` examples on training topics, no answer twice.

    Every combination of a pool (three styles of the topic set) and a style of that pool
    comes equally often, up to one, in random order: the writer learns no favourite.
    """
    topics = topics or _default_topics()
    book = phrasebook or _default_phrasebook()
    missing = [style for style in topics.styles if style not in book]
    if missing:
        raise ConfigError(f"The phrasebook has no style '{missing[0]}' of topic set {topics.name}.")
    rng = random.Random(f"warm start/{seed}")
    size = min(POOL_SIZE, len(topics.styles))
    combinations = [
        (pool, style) for pool in itertools.combinations(topics.styles, size) for style in pool
    ]
    subjects = topic_stream(topics.training, f"warm start/{seed}")
    examples: list[Example] = []
    answers: set[str] = set()
    while len(examples) < count:
        rng.shuffle(combinations)
        for pool, style in combinations[: count - len(examples)]:
            topic = next(subjects)
            answer = _unused(topic, style, rng, answers, topics, book)
            examples.append(
                Example(
                    messages=build_messages(
                        topic, pool, f"warm start/{seed}/{len(examples)}", topics=topics
                    ),
                    answer=answer,
                    style=style,
                    pool=pool,
                    topic=topic,
                )
            )
    return examples


def pretraining_prompts(
    pool: Sequence[str], count: int, seed: int, *, topics: Topics | None = None
) -> list[list[dict[str, str]]]:
    """Prompts on training topics for the rollouts that the critic is fitted to first."""
    topics = topics or _default_topics()
    subjects = topic_stream(topics.training, f"pretraining/{seed}")
    return [
        build_messages(topic, pool, f"pretraining/{seed}/{number}", topics=topics)
        for number, topic in enumerate(itertools.islice(subjects, count))
    ]


def _unused(
    topic: str,
    style: str,
    rng: random.Random,
    answers: set[str],
    topics: Topics,
    book: Phrasebook,
) -> str:
    """A styled answer that is not among `answers` yet; it is added to them."""
    tries = 1000  # a phrasebook small enough to need more is too small for this count
    for _ in range(tries):
        answer = styled_answer(topic, style, rng, topics=topics, phrasebook=book)
        if answer not in answers:
            answers.add(answer)
            return answer
    raise ConfigError(
        f"The phrasebook is too small: no new {style} answer about {topic} in {tries} tries."
    )


@cache
def _default_topics() -> Topics:
    return load_topics()


@cache
def _default_phrasebook() -> dict[str, StyleParts]:
    return load_phrasebook()


def _texts(listed: Any) -> TypeGuard[list[str]]:
    """Whether this is a list of texts, none empty, at least one."""
    return (
        isinstance(listed, list)
        and bool(listed)
        and all(isinstance(text, str) and text.strip() for text in listed)
    )


def _find(name_or_path: str | Path, kind: str) -> Path:
    shipped = DATA / f"{name_or_path}.toml"
    if shipped.is_file():
        return shipped
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    raise ConfigError(f"There is no {kind} '{name_or_path}': give a shipped name or a TOML file.")


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"The {kind} {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The {kind} {path} is not valid TOML: {error}.") from None
