"""The command `online-sao`. Each subcommand imports what it needs, so --help is quick."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from online_sao.config import EMBEDDED_MODEL, PRESETS, Config, settings_text
from online_sao.errors import OnlineSAOError

EXIT_ERROR = 2
EXIT_FAULT = 1  # of `doctor`: it worked, and found something


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    _leave_by_one_door()
    try:
        return args.run(args) or 0
    except OnlineSAOError as error:
        print(f"online-sao: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _leave_by_one_door() -> None:
    """SIGTERM is Ctrl-C: both raise KeyboardInterrupt, and the way out cleans up.

    Ctrl-C is set too: a shell starts background jobs with it ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="online-sao",
        description="A chat endpoint that keeps learning while it serves.",
        epilog="Start with:  online-sao serve    then chat with it as with any OpenAI server.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    prepare = commands.add_parser(
        "prepare",
        help="make the embedded model ready (once, a few minutes)",
        description="Unpack the embedded model and teach it the writing styles. Later commands "
        "do this by themselves; run it alone to get the wait over with.",
    )
    prepare.add_argument("model", nargs="?", default=EMBEDDED_MODEL, help="default: %(default)s")
    prepare.set_defaults(run=_prepare)

    serve = commands.add_parser(
        "serve",
        help="serve and learn until Ctrl-C",
        description="Serve an OpenAI-compatible endpoint; every judged answer updates the "
        "weights that answer the next request.",
    )
    _config_options(serve)
    serve.add_argument("--host", help="default 127.0.0.1")
    serve.add_argument("--port", type=int, help="default 8000")
    serve.add_argument(
        "--insecure", action="store_true", default=None, help="bind openly without keys"
    )
    serve.add_argument(
        "--keep-weights",
        action="store_true",
        default=None,
        help="settings of the learner have changed: go on from what was learned, not from the "
        "start weights",
    )
    serve.set_defaults(run=_serve)

    train = commands.add_parser(
        "train",
        help="run a scenario offline, over presets and seeds",
        description="Generate, judge and update in one process, without HTTP: the same learner, "
        "judge and scenarios as the service. Give several presets and seeds for a sweep; what "
        "is finished is not run again, what was interrupted goes on. What the settings say of the "
        "service (queue order, policy lag, credit, publishing, engine threads) plays no part, and "
        "--lag stands for a scenario's concurrency and max_in_flight.",
        epilog="Example: online-sao train --scenario scenarios/preference_shift.toml "
        "--presets sao running_mean --seeds 0 1 2 --lag 4, then python scenarios/compare.py DIR",
    )
    _config_options(train, run_dir=False)  # which is the endpoint's; results go to --out
    train.set_defaults(run_dir=None)
    train.add_argument("--scenario", required=True, metavar="FILE.toml")
    train.add_argument("--presets", nargs="+", choices=list(PRESETS), help="instead of --preset")
    train.add_argument(
        "--seeds", nargs="+", type=int, help="instead of --seed (default: the scenario's)"
    )
    train.add_argument("--lag", type=int, default=4, help="requests per generation (default 4)")
    train.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, each on its share of the cores (default 1)",
    )
    train.add_argument("--phase-rollouts", type=int, metavar="N", help="rollouts in each phase")
    train.add_argument(
        "--heldout-every", type=int, metavar="N", help="rollouts between held-out evaluations"
    )
    train.add_argument(
        "--heldout-answers", type=int, metavar="N", help="held-out answers per evaluation"
    )
    train.add_argument(
        "--final-answers",
        type=int,
        metavar="N",
        help="held-out answers at each phase's end (default: --heldout-answers if given)",
    )
    train.add_argument("--out", default="runs/offline", metavar="DIR")
    train.set_defaults(run=_train)

    settings = commands.add_parser(
        "settings",
        help="print every setting with its meaning, as a config file",
        description="Print all settings as they are with the options given, each under what it "
        "means. `online-sao settings > my.toml` is a start for `online-sao serve --config my.toml`;"
        " what you leave out of the file keeps its default.",
    )
    _config_options(settings)
    settings.set_defaults(run=_settings)

    doctor = commands.add_parser(
        "doctor",
        help="check model, disk, store, judge and endpoint, with one request each",
        description="Says what is wrong and what to do. Exit code 1 if anything is. Give it the "
        "same options as `serve`; a judge that costs money is asked for two verdicts.",
    )
    _config_options(doctor)
    doctor.add_argument("--host", help="that the endpoint was started with")
    doctor.add_argument("--port", type=int, help="that the endpoint was started with")
    doctor.add_argument("--url", help="the endpoint, instead of host and port")
    doctor.set_defaults(run=_doctor)

    migrate = commands.add_parser(
        "migrate",
        help="bring an older store to this version's schema",
        description="`serve` does this by itself; other commands refuse an older store. SQLite: "
        "a copy of the file is made before. PostgreSQL: back it up before.",
    )
    migrate.add_argument("--run-dir", metavar="DIR", help="folder of the endpoint's state")
    migrate.add_argument("--store", metavar="URL", help="database, instead of --run-dir")
    migrate.set_defaults(run=_migrate)

    export = commands.add_parser(
        "export",
        help="write a version as a model folder",
        description="Write the weights of a version whose checkpoint is retained as a folder in "
        "Hugging Face form, which transformers and vLLM load. The endpoint may be running; to "
        "export what it serves now, ask it to keep that first: POST /v1/learning/checkpoint.",
        epilog="Example: online-sao export ./my-model --version 120",
    )
    export.add_argument("out", metavar="DIR", help="folder to make")
    export.add_argument("--version", type=int, help="default: the newest that is retained")
    export.add_argument("--run-dir", metavar="DIR", help="folder of the endpoint's state")
    export.add_argument("--store", metavar="URL", help="database, if not in --run-dir")
    export.set_defaults(run=_export)

    dashboard = commands.add_parser(
        "dashboard",
        help="watch an endpoint in the browser",
        description="Open the dashboard on an endpoint's store.",
    )
    dashboard.add_argument("--run-dir", metavar="DIR", help="folder of the endpoint's state")
    dashboard.add_argument("--store", metavar="URL", help="database, instead of --run-dir")
    dashboard.add_argument("--url", default="http://127.0.0.1:8000", help="the endpoint itself")
    dashboard.add_argument("--runs", default="runs", metavar="DIR", help="results of simulations")
    dashboard.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer.json or its folder, if it is not found"
    )
    dashboard.add_argument("--port", type=int, default=8501)
    dashboard.set_defaults(run=_dashboard)

    return parser


def _config_options(parser: argparse.ArgumentParser, *, run_dir: bool = True) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument(
        "--preset", choices=list(PRESETS), help="the learning method (default: sao)"
    )
    parser.add_argument("--model", help="folder, hub name, or the embedded model (default)")
    parser.add_argument("--judge", metavar="MODEL", help="offline/archetypes or a litellm model")
    parser.add_argument("--seed", type=int, help="seed of the learner")
    if run_dir:
        parser.add_argument("--run-dir", metavar="DIR", help="folder of this endpoint's state")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting, as learner.policy_lr=2e-5; may be repeated",
    )


def load_config(args: argparse.Namespace, needed: dict[str, Any] | None = None) -> Config:
    """The settings that the options describe, on top of `needed`. Raises ConfigError."""
    named = {
        "model.name": args.model,
        "judge.model": args.judge,
        "learner.seed": args.seed,
        "service.run_dir": args.run_dir,
        "service.host": getattr(args, "host", None),
        "service.port": getattr(args, "port", None),
        "service.insecure": getattr(args, "insecure", None),
        "service.keep_weights": getattr(args, "keep_weights", None),
    }
    overrides = dict(needed or {})
    overrides |= {key: value for key, value in named.items() if value is not None}
    for assignment in args.set:
        key, _, text = assignment.partition("=")
        overrides[key.strip()] = _value(text.strip())
    return Config.load(args.config, preset=args.preset, overrides=overrides)


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none (so that quotes are optional)."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _prepare(args: argparse.Namespace) -> None:
    from online_sao.prepare import resolve_model

    print(resolve_model(args.model))


def _serve(args: argparse.Namespace) -> None:
    config = load_config(args)
    from online_sao.progress import make_progress
    from online_sao.service.serve import running_endpoint

    with running_endpoint(config, _say) as endpoint:
        with make_progress() as bar:
            task = bar.add_task("value pretraining", total=None)

            def on_status(status: dict[str, Any]) -> None:
                stage = status.get("pretraining") or {}
                bar.update(
                    task,
                    description=f"value pretraining: {stage.get('state', 'waiting')}",
                    total=stage.get("total") or None,
                    completed=stage.get("done", 0),
                )

            endpoint.wait_ready(on_status)
        _say(
            f"ready at {endpoint.url}  (model {config.served_name}, preset "
            f"{config.learner.preset}, state in {config.run_dir})"
        )
        _say(
            "chat:   curl -s " + endpoint.url + "/v1/chat/completions -H 'Content-Type: "
            'application/json\' -d \'{"model": "' + config.served_name + '", "messages": '
            '[{"role": "user", "content": "Write about rain."}]}\''
        )
        _say(f"watch:  online-sao dashboard --run-dir {config.run_dir}   (Ctrl-C ends serving)")
        endpoint.watch()


def _export(args: argparse.Namespace) -> None:
    from pathlib import Path

    from online_sao.learner.export import export_version
    from online_sao.store import RolloutStore

    settings = {"service.run_dir": args.run_dir, "store.url": args.store}
    overrides = {key: value for key, value in settings.items() if value is not None}
    config = Config.load(overrides=overrides)
    if not args.store and not (config.run_dir / "store.sqlite").is_file():
        raise OnlineSAOError(
            f"{config.run_dir} holds no store: name the endpoint's folder with --run-dir, or its "
            "database with --store."
        )
    with RolloutStore(config.store_url) as store:
        version = export_version(store, Path(args.out), args.version)
    _say(f"version {version} written to {args.out}")


def _train(args: argparse.Namespace) -> None:
    from pathlib import Path

    from online_sao.scenario import load_scenario
    from online_sao.sweep import PlannedRun, sweep

    presets, seeds = args.presets or [args.preset], args.seeds or [args.seed]
    scenario = load_scenario(args.scenario).replace(
        phase_rollouts=args.phase_rollouts,
        heldout_every=args.heldout_every,
        heldout_answers=args.heldout_answers,
        final_answers=args.final_answers or args.heldout_answers,
    )
    runs: list[PlannedRun] = []
    for seed in seeds:  # outer: what is compared with one another is finished together
        for preset in presets:
            args.preset, args.seed = preset, seed
            config = load_config(args, scenario.settings)
            if "seed" not in config.learner.model_fields_set:
                args.seed = scenario.seed
                config = load_config(args, scenario.settings)
            learner = config.learner  # preset and seed may be the config file's
            folder = Path(args.out) / f"{learner.preset}-seed{learner.seed}"
            if any(planned.folder == folder for planned in runs):
                raise OnlineSAOError(
                    f"Two of these runs would work in {folder}; name each preset and each seed "
                    "once, and set neither of them with --set."
                )
            runs.append(PlannedRun(config, scenario.replace(seed=learner.seed), folder, args.lag))
    sweep(runs, args.jobs, _say)


def _settings(args: argparse.Namespace) -> None:
    print(settings_text(load_config(args)), end="")


def _doctor(args: argparse.Namespace) -> int:
    config = load_config(args)
    from online_sao.service.doctor import examine

    findings = examine(config, args.url)
    for finding in findings:
        print(f"{'FAULT' if finding.is_fault else 'ok':<6}{finding.part:<7}{finding.what}")
        if finding.is_fault:
            print(f"{'':<13}-> {finding.remedy}")
    return EXIT_FAULT if any(finding.is_fault for finding in findings) else 0


def _migrate(args: argparse.Namespace) -> None:
    from online_sao.store.migration import migrate

    overrides = {"service.run_dir": args.run_dir} if args.run_dir else {}
    done = migrate(args.store or Config.load(overrides=overrides).store_url)
    if done is None:
        _say("nothing to do")
        return
    copy = f"; a copy from before is {done.backup}" if done.backup else ""
    _say(f"migrated from schema {done.before} to {done.after}{copy}")


def _dashboard(args: argparse.Namespace) -> int:
    import subprocess
    from importlib.util import find_spec
    from pathlib import Path

    overrides = {"service.run_dir": args.run_dir} if args.run_dir else {}
    store = args.store or Config.load(overrides=overrides).store_url
    spec = find_spec("dashboard")
    assert spec is not None
    assert spec.origin is not None
    app = Path(spec.origin).with_name("app.py")
    command = [sys.executable, "-m", "streamlit", "run", str(app)]
    command += ["--server.port", str(args.port), "--browser.gatherUsageStats", "false"]
    command += ["--server.headless", "true", "--", "--store", store, "--url", args.url]
    command += ["--runs", args.runs]
    if args.tokenizer:
        command += ["--tokenizer", args.tokenizer]
    _say(f"dashboard at http://127.0.0.1:{args.port}")
    return subprocess.call(command)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
