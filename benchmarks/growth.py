"""What grows with the model, and with the store.

    python benchmarks/growth.py [--rounds 5] [--sizes 1000 10000 100000 1000000] [--out growth.json]

First the update of one rollout (preset sao, 90 + 40 tokens) of three models that take turns: the
tests' tiny one, the embedded 135M, and a 360M of random weights (SmolLM2-360M's shape). Then
what the life of one rollout asks of the store (recorded, marked, claimed, trained), on SQLite
files that hold more and more rollouts; medians of 200. Memory against hours: benchmarks/soak.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from update import Contender

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "dashboard")]

from generate import generate  # noqa: E402
from tiny import make_tiny_model  # noqa: E402

from online_sao.config import EMBEDDED_MODEL  # noqa: E402
from online_sao.prepare import resolve_model  # noqa: E402
from online_sao.progress import make_progress  # noqa: E402
from online_sao.store import RolloutStore  # noqa: E402
from online_sao.types import Rollout, StoredVerdict, WeightSpan, WeightVersion  # noqa: E402

SIZES = ["--prompt", "90", "--answer", "40"]
WARM = 2
REPEATS = 200
OPERATIONS = ("record", "mark", "claim", "finish an update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, make_progress() as bar:
        models = update_against_parameters(Path(folder), args.rounds, bar)
        stores = store_against_rollouts(Path(folder), args.sizes, bar)
    if args.out:
        args.out.write_text(json.dumps({"models": models, "stores": stores}, indent=1) + "\n")
    print("| model | million parameters | update, s | per million, ms | peak, GiB |")
    print("|---|---|---|---|---|")
    for name, found in models.items():
        millions = found["parameters"] / 1e6
        print(
            f"| {name} | {millions:.1f} | {found['seconds']:.2f} "
            f"| {found['seconds'] / millions * 1000:.1f} | {found['peak_gib']:.1f} |"
        )
    print(f"\n| rollouts | {' | '.join(f'{name}, ms' for name in OPERATIONS)} | file, MB |")
    print("|---|" + "---|" * (len(OPERATIONS) + 1))
    for size, times in stores.items():
        shown = " | ".join(f"{times[name] * 1000:.1f}" for name in OPERATIONS)
        print(f"| {size:,} | {shown} | {times['bytes'] / 1e6:.0f} |")


def update_against_parameters(folder: Path, rounds: int, bar: Any) -> dict[str, dict[str, Any]]:
    embedded = str(resolve_model(EMBEDDED_MODEL))
    large = folder / "large"
    shape = LlamaConfig.from_pretrained(embedded)
    shape.update(
        {
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "head_dim": 64,
        }
    )
    torch.manual_seed(0)
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(large)
    paths = {
        "tiny": str(make_tiny_model(folder / "tiny")),
        "135M": embedded,
        "360M": str(large),
    }
    task = bar.add_task("update against parameters", total=(rounds + WARM) * len(paths))
    contenders = {
        name: Contender("ours", sys.executable, ["--model", path, *SIZES])
        for name, path in paths.items()
    }
    for contender in contenders.values():
        contender.wait_ready()
    for _ in range(rounds + WARM):
        for contender in contenders.values():
            contender.go()
            bar.advance(task)
    found = {}
    for name, contender in contenders.items():
        contender.end()
        kept = contender.results[WARM:]
        found[name] = {
            "parameters": _num_parameters(paths[name]),
            "seconds": statistics.median(result["seconds"] for result in kept),
            "peak_gib": kept[-1]["peak_gib"],
        }
    return found


def _num_parameters(path: str) -> int:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(path))
    return sum(parameter.numel() for parameter in model.parameters())


def store_against_rollouts(folder: Path, sizes: list[int], bar: Any) -> dict[int, dict[str, float]]:
    task = bar.add_task("store against rollouts", total=len(sizes))
    found = {}
    for size in sizes:
        path = folder / f"{size}.sqlite"
        generate(f"sqlite:///{path}", size, live=False)
        with RolloutStore(f"sqlite:///{path}") as store:
            times = _life_of_rollouts(store)
        found[size] = times | {"bytes": path.stat().st_size}
        path.unlink()
        bar.advance(task)
    return found


def _life_of_rollouts(store: RolloutStore) -> dict[str, float]:
    epoch, run = store.new_epoch(), store.current_run()
    assert run is not None
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    zeros = np.zeros(40, np.float32)

    def timed(name: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = work(*args, **kwargs)
        times[name].append(time.perf_counter() - began)
        return result

    for number in range(REPEATS):
        id, version = f"benchmark-{number}", store.next_version()
        timed("record", store.add, _rollout(id, version - 1))
        timed("mark", store.set_verdict, id, StoredVerdict(quality=1, style=1, reward=1.0))
        claimed = timed(
            "claim",
            store.claim,
            epoch=epoch,
            limit=1,
            order="newest",
            current_version=version - 1,
            max_policy_lag=10**9,
            max_claims=3,
            run_id=run.id,
        )
        assert [rollout.id for rollout in claimed] == [id]
        timed(
            "finish an update",
            store.finish_update,
            epoch=epoch,
            version=WeightVersion(version, version - 1, run.id, "update"),
            rollouts=[(id, zeros, zeros, zeros)],
        )
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _rollout(id: str, version: int) -> Rollout:
    return Rollout(
        id=id,
        response_id=id,
        choice=0,
        prompt_token_ids=np.zeros(90, np.int32),
        token_ids=np.zeros(40, np.int32),
        behavior_logprobs=np.zeros(40, np.float32),
        weight_spans=(WeightSpan(version, 0, 40),),
        temperature=1.0,
        messages=[{"role": "user", "content": "Write about rain."}],
        answer="Rain.",
        finish_reason="stop",
    )


if __name__ == "__main__":
    main()
