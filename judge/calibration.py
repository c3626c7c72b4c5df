"""How well a judge agrees with labels, or with another judge."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from judge.judge import Judge
from judge.verdict import NO_STYLE, JudgeError, Unscored, Verdict

Z_95 = 1.959964


@dataclass(frozen=True)
class Record:
    """One labelled answer."""

    id: str
    messages: list[dict[str, Any]]
    answer: str
    style: str
    quality: int
    hostile: bool = False
    kind: str = ""


@dataclass
class Report:
    """What came of a calibration. Hostile answers are counted apart from the others: for
    them it only matters that none earns a reward, whichever style is preferred."""

    model: str
    styles: tuple[str, ...]
    style_pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(true, detected) of answers that are not hostile."""
    quality_pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(true, given) of answers that are not hostile."""
    reward_agreed: int = 0
    num_hostile: int = 0
    hostile_rewarded: list[str] = field(default_factory=list)
    hostile_quality_1: int = 0
    disagreements: list[str] = field(default_factory=list)
    unscored: Counter[str] = field(default_factory=Counter)
    cost: float = 0.0

    @property
    def num_plain(self) -> int:
        return sum(self.quality_pairs.values())

    @property
    def style_agreed(self) -> int:
        return sum(n for (true, seen), n in self.style_pairs.items() if true == seen)

    @property
    def quality_agreed(self) -> int:
        return sum(n for (true, given), n in self.quality_pairs.items() if true == given)

    def text(self) -> str:
        """The report as a page of text."""
        n = self.num_plain
        lines = [
            f"judge              {self.model}",
            f"answers            {n} and {self.num_hostile} hostile",
            f"style agrees       {share(self.style_agreed, n)}",
            f"quality agrees     {share(self.quality_agreed, n)}",
            f"reward agrees      {share(self.reward_agreed, n)}",
            f"hostile rewarded   {len(self.hostile_rewarded)} of {self.num_hostile}"
            f" (quality 1: {self.hostile_quality_1})",
            f"unscored           {sum(self.unscored.values())}"
            + "".join(f", {reason} {count}" for reason, count in sorted(self.unscored.items())),
            f"cost               ${self.cost:.4f}",
            "",
            "style: true (rows) against detected (columns)",
        ]
        names = [*self.styles, NO_STYLE]
        width = max(map(len, names)) + 2
        lines.append(" " * width + "".join(name.rjust(width) for name in names))
        for true in names:
            cells = (self.style_pairs[true, seen] for seen in names)
            lines.append(true.ljust(width) + "".join(str(c).rjust(width) for c in cells))
        lines += ["", "quality: true (rows) against given (columns)", f"{'':6}{0:>6}{1:>6}"]
        for true_bit in (0, 1):
            lines.append(
                f"{true_bit:<6}"
                + "".join(f"{self.quality_pairs[true_bit, given]:>6}" for given in (0, 1))
            )
        if self.disagreements:
            lines += ["", f"disagreements ({len(self.disagreements)})", *self.disagreements]
        return "\n".join(lines)


def read_records(path: str | Path) -> list[Record]:
    """Labelled answers from a JSONL file. JudgeError names the line that is wrong."""
    records = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise JudgeError(f"There is no labelled file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"The labelled file {path} cannot be read: {error}.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise JudgeError(f"{where} is not JSON: {error}.") from None
        if not isinstance(data, dict):
            raise JudgeError(f"{where} is not a JSON object.")
        messages = data.get("messages")
        if messages is None and isinstance(data.get("prompt"), str):
            messages = [{"role": "user", "content": data["prompt"]}]
        answer, style, quality = data.get("answer"), data.get("style"), data.get("quality")
        if not isinstance(messages, list) or not isinstance(answer, str):
            raise JudgeError(f"{where} needs 'answer' and 'messages' (or 'prompt').")
        if not isinstance(style, str) or quality not in (0, 1):
            raise JudgeError(f"{where} needs 'style' (a name or none) and 'quality' (0 or 1).")
        records.append(
            Record(
                id=str(data.get("id", number)),
                messages=messages,
                answer=answer,
                style=style,
                quality=int(quality),
                hostile=bool(data.get("hostile", False)),
                kind=str(data.get("kind", "")),
            )
        )
    if not records:
        raise JudgeError(f"The labelled file {path} has no records.")
    return records


async def calibrate(judge: Judge, records: Sequence[Record], pool: Sequence[str] = ()) -> Report:
    """Score every record. A hostile one is asked about once per style; the worst counts."""
    styles = tuple(pool or judge.preferences.styles)
    for record in records:
        if record.style != NO_STYLE and record.style not in judge.preferences.styles:
            raise JudgeError(
                f"Record {record.id} has the style '{record.style}', which the preference set "
                f"'{judge.preferences.name}' lacks."
            )
    tasks = [
        [
            asyncio.ensure_future(judge.score(record.messages, record.answer, style, styles))
            for style in _asked(record, styles)
        ]
        for record in records
    ]
    report = Report(judge.model, styles)
    for record, waiting in zip(records, tasks, strict=True):
        outcomes = [await task for task in waiting]
        report.cost += sum(outcome.cost for outcome in outcomes)
        report.model = outcomes[0].model or report.model
        for outcome in outcomes:
            if isinstance(outcome, Unscored):
                report.unscored[outcome.reason] += 1
        verdicts = [outcome for outcome in outcomes if isinstance(outcome, Verdict)]
        if record.hostile:
            report.num_hostile += 1
            report.hostile_quality_1 += any(v.quality for v in verdicts)
            rewarded = [v for v in verdicts if v.reward]
            if rewarded:
                report.hostile_rewarded.append(record.id)
                report.disagreements.append(_line(record, rewarded[0], "rewarded though hostile"))
        elif verdicts:
            _compare(report, record, verdicts[0], _asked(record, styles)[0])
    return report


def _asked(record: Record, styles: Sequence[str]) -> tuple[str, ...]:
    """The styles a record is scored against."""
    if record.hostile:
        return tuple(styles)
    if record.style in styles:
        return (record.style,)
    return (styles[zlib.crc32(record.id.encode()) % len(styles)],)


def _compare(report: Report, record: Record, verdict: Verdict, asked: str) -> None:
    true_style = record.style if record.style in report.styles else NO_STYLE
    seen = verdict.detected_style if verdict.detected_style in report.styles else NO_STYLE
    report.style_pairs[true_style, seen] += 1
    report.quality_pairs[record.quality, verdict.quality] += 1
    true_reward = int(record.quality and true_style == asked)
    report.reward_agreed += true_reward == verdict.reward
    wrong = []
    if seen != true_style:
        wrong.append(f"style {seen}, labelled {true_style}")
    if verdict.quality != record.quality:
        wrong.append(f"quality {verdict.quality}, labelled {record.quality}")
    if wrong:
        report.disagreements.append(_line(record, verdict, "; ".join(wrong)))


def _line(record: Record, verdict: Verdict, what: str) -> str:
    answer = " ".join(record.answer.split())
    return f"- {record.id} ({record.kind}): {what}. {verdict.rationale} | {answer[:160]}"


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval)."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    center = p + Z_95**2 / (2 * n)
    spread = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n))
    scale = 1 + Z_95**2 / n
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def share(successes: int, n: int) -> str:
    """`0.93 (13 of 14; 95 % interval 0.69-0.99)`"""
    if n == 0:
        return "- (none)"
    low, high = wilson(successes, n)
    return f"{successes / n:.3f} ({successes} of {n}; 95 % interval {low:.3f}-{high:.3f})"
