"""What the guard rails would have said about a run that is over, or is running.

    python benchmarks/replay_guards.py RUN_DIR/store.sqlite [--set guards.window=64]

Reads the store (nothing is written), hands its trained rollouts to the guards in order, and
prints for each guard how near its number came to its bound, and every firing. Use it before
you change a bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import sqlalchemy as sa

from online_sao.cli import _value
from online_sao.config import Config
from online_sao.learner.guards import GUARDS, GuardRails, ProbeResult, make_samples
from online_sao.store.database import make_engine, parse_url
from online_sao.store.models import events, rollouts, versions
from online_sao.store.store import load_rollouts
from online_sao.types import RolloutState

PAGE = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", help="SQLite file, or a database URL")
    parser.add_argument("--set", action="append", default=[], metavar="GUARDS.KEY=VALUE")
    args = parser.parse_args()
    url = args.store if "://" in args.store else f"sqlite:///{args.store}"
    pairs = (assignment.partition("=") for assignment in args.set)
    guards = GuardRails(Config.load(overrides={k: _value(v) for k, _, v in pairs}).guards)
    extremes: dict[str, float] = {}
    firings: list[str] = []
    num_rollouts = 0
    for item in _trained_and_probes(url):
        if isinstance(item, ProbeResult):
            fired = guards.observe_probe(item)
        else:
            fired = guards.observe(item)
            num_rollouts += len(item)
        if guards.status()["rollouts_seen"] == guards.status()["window"]:
            for guard in GUARDS:
                value = guards.values()[guard.name]
                if value is not None:
                    known = extremes.get(guard.name, value)
                    extremes[guard.name] = (max if guard.is_upper else min)(known, value)
        if fired is not None:
            known = extremes.get(fired.guard.name, fired.value)  # the window is empty again
            nearer = max if fired.guard.is_upper else min
            extremes[fired.guard.name] = nearer(known, fired.value)
            firings.append(f"after version {fired.good_version + 1}: {fired.describe()}")
    print(f"{args.store}: {num_rollouts} trained rollouts")
    print(f"{'guard':<20} {'nearest':>9} {'bound':>7}")
    bounds = guards.status()["bounds"]
    for guard in GUARDS:
        nearest, bound = extremes.get(guard.name), bounds[guard.name]
        shown = "-" if nearest is None else f"{nearest:.4f}"
        print(f"{guard.name:<20} {shown:>9} {'off' if bound is None else bound:>7}")
    print(*(firings or ["no guard fires"]), sep="\n")


def _trained_and_probes(url: str) -> Iterator[list | ProbeResult]:
    """Samples of each update, and rounds of probes, in the order of their versions."""
    engine = make_engine(parse_url(url), read_only=True)
    with engine.connect() as conn:
        trained = conn.execute(
            sa.select(rollouts.c.trained_version, rollouts.c.seq)
            .where(rollouts.c.state == RolloutState.TRAINED)
            .order_by(rollouts.c.trained_version, rollouts.c.seq)
        ).all()
        metrics = dict(conn.execute(sa.select(versions.c.version, versions.c.metrics)).all())
        probes = [
            ProbeResult(**{k: v for k, v in data.items() if k != "run_id"})
            for (data,) in conn.execute(
                sa.select(events.c.data).where(events.c.kind == "probe").order_by(events.c.id)
            )
        ]
        for start in range(0, len(trained), PAGE):
            page = trained[start : start + PAGE]
            loaded = load_rollouts(conn, [seq for _, seq in page], with_tokens=True)
            for (version, _), rollout in zip(page, loaded, strict=True):
                while probes and probes[0].version < version:
                    yield probes.pop(0)
                yield make_samples(version, [rollout], metrics[version])
    yield from probes
    engine.dispose()


if __name__ == "__main__":
    main()
