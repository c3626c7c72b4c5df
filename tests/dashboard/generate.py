"""A store as a preference shift leaves it: for tests, screenshots and benchmarks.

    python tests/dashboard/generate.py sqlite:///demo.sqlite --rollouts 450

Rows go in by the table, not through RolloutStore, so that a million take minutes. A word-level
tokenizer.json that reads the generated tokens is written on request.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from online_sao.store import RolloutStore
from online_sao.store.models import (
    counters,
    rollout_details,
    rollout_tokens,
    rollouts,
    versions,
)
from online_sao.types import Preference, Run

PHASES = (
    ("cute", ("academic", "cute", "chuunibyou")),
    ("chuunibyou", ("academic", "cute", "chuunibyou")),
    ("classical", ("classical", "cute", "chuunibyou")),
)
TEXTS = {
    "academic": "In this study we observe that {0} exhibits a measurable structure . "
    "The evidence suggests a robust relation between {0} and daily routine .",
    "cute": "Aww , {0} is the tiniest bundle of joy ! Snuggle close and giggle with {0} , "
    "sweet little friend !",
    "chuunibyou": "Behold ! The sealed power of {0} awakens within my cursed arm . "
    "Kneel before the abyss that guards {0} !",
    "classical": "O gentle {0} , thou dost adorn the morn with grace . Hark , how {0} doth "
    "sing beneath the silver moon .",
    "none": "There is not much to say about {0} . It is what it is .",
}
TOPICS = ("rain", "tea", "bread", "snow", "umbrellas", "photographs", "soup", "trains")
SECONDS_APART = 2.4
CHUNK = 5000


def _words() -> dict[str, int]:
    words = [word for text in TEXTS.values() for word in text.format("x").split()]
    return {word: number for number, word in enumerate(dict.fromkeys([*words, *TOPICS]))}


WORDS = _words()


def write_tokenizer(path: Path) -> None:
    """A tokenizer whose ids are those of the generated rollouts."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(WORDS, unk_token="x")).save(str(path))


def _shares(count: int) -> tuple[list[str], np.ndarray]:
    """Probability of each style per rollout: after each switch the preferred one takes over."""
    styles = ["academic", "cute", "chuunibyou", "classical", "none"]
    shares = np.zeros((count, len(styles)))
    now = np.array([0.3, 0.33, 0.3, 0.02, 0.05])
    for number, (style, pool) in enumerate(PHASES):
        start, end = (count * (number + k) // len(PHASES) for k in (0, 1))
        allowed = np.array([name in (*pool, "none") for name in styles])
        goal = np.where(np.array(styles) == style, 0.93, 0.02) * allowed
        goal /= goal.sum()
        flat = np.where(allowed, [0.25] * 4 + [0.06], 0.0)
        flat /= flat.sum()
        progress = np.linspace(0, 1, max(end - start, 1))[: end - start, None]
        opened = 1 / (1 + np.exp(-(progress - 0.15) * 25))
        won = 1 / (1 + np.exp(-(progress - 0.45) * 14))
        phase = (1 - opened) * now * (allowed + 1e-9) + opened * ((1 - won) * flat + won * goal)
        shares[start:end] = phase / phase.sum(1, keepdims=True)
        if end > start:
            now = shares[end - 1]
    return styles, shares


def generate(
    url: str, count: int, *, seed: int = 0, run_id: str = "sao-seed0-demo", live: bool = True
) -> None:
    """Fill an empty store with `count` rollouts. `live`: the newest are still on their way."""
    rng = np.random.default_rng(seed)
    store = RolloutStore(url)
    begin = datetime.now(UTC) - timedelta(seconds=SECONDS_APART * count + 2)
    learner = {"max_policy_lag": 16, "objective": "dis", "eps_low": 0.3, "eps_high": 5.0}
    config = {"learner": {"preset": "sao", **learner}}
    store.start_run(Run(run_id, "sao", seed, "smollm2-135m-writer", "0f3a9c", config))
    store.new_epoch()
    engine = sa.create_engine(store.url) if "sqlite" in store.url else store._engine
    styles, shares = _shares(count)
    detected = (rng.random((count, 1)) > shares.cumsum(1)).sum(1).clip(0, len(styles) - 1)
    preferences: list[Preference] = []
    value = 0.33
    version = 0
    with engine.begin() as conn:
        conn.execute(versions.insert(), [_version(0, run_id, begin, {}, kind="start")])
    batch: list[tuple[dict[str, Any], ...]] = []
    made: list[dict[str, Any]] = []
    for index in range(count):
        seq = index + 1
        phase = min(index * len(PHASES) // count, len(PHASES) - 1)
        at = begin + timedelta(seconds=SECONDS_APART * index)
        if phase == len(preferences):
            style, pool = PHASES[phase]
            kept = store.set_preference(Preference(style, pool, note=f"phase {phase + 1}"), version)
            _set_time(store, kept.event_id, at)
            preferences.append(
                Preference(style, pool, kept.note, kept.event_id, at, weight_version=version)
            )
        preference = preferences[-1]
        style = styles[detected[index]]
        quality = float(rng.random() > 0.06)
        match = float(style == preference.style)
        reward = quality * match
        chance = rng.random()
        state, reason, judge_state = "trained", None, "scored"
        if chance < 0.01:
            state, reason, judge_state = "unscored", "timeout", "unscored"
        elif chance < 0.03:
            state, reason = "excluded", ("top_p" if rng.random() < 0.6 else "opted_out")
        elif chance < 0.035:
            state, reason = "stale", "policy_lag"
        if live and seq > count - 3 and count > 3:
            state, reason, judge_state = "pending", None, "waiting"
        lag = int(rng.integers(0, 4))
        start = max(0, version - lag)
        marks = judge_state == "scored"
        trained = state == "trained"
        tokens = _tokens(rng, style, index, value, reward, trained)
        if trained:
            version += 1
            made.append(
                _version(version, run_id, at, _metrics(rng, value, reward, lag, index, count))
            )
        short = {
            "seq": seq,
            "id": f"chatcmpl-{seq:07d}",
            "response_id": f"chatcmpl-{seq:07d}",
            "choice": 0,
            "created_at": at,
            "run_id": run_id,
            "state": state,
            "reason": reason,
            "judge_state": judge_state,
            "purpose": "serve",
            "session_id": f"session-{index // 7}" if index % 3 == 0 else None,
            "style": preference.style,
            "preference_id": preference.event_id,
            "temperature": 1.0,
            "finish_reason": "stop",
            "latency_s": float(rng.gamma(4, 0.2)),
            "weight_version_start": start,
            "weight_version_end": max(start, version - 1 if trained else version),
            "num_prompt_tokens": 48,
            "num_action_tokens": tokens["n"],
            "reward": reward if marks else None,
            "quality": quality if marks else None,
            "style_match": match if marks else None,
            "reward_source": "judge" if marks else None,
            "detected_style": style if marks else None,
            "num_claims": int(trained),
            "claimed_epoch": 1 if trained else None,
            "trained_version": version if trained else None,
            "trained_at": at + timedelta(seconds=2) if trained else None,
            "value_first": value if trained else None,
            "deleted_at": None,
        }
        text = tokens["text"]
        topic = TOPICS[index % len(TOPICS)]
        details = {
            "seq": seq,
            "messages": [
                {
                    "role": "system",
                    "content": "You are a writer. Select one style from this pool: "
                    f"{', '.join(preference.pool)}. Write only in the style you selected.",
                },
                {"role": "user", "content": f"Write a few lines about {topic}."},
            ],
            "answer": text,
            "client_metadata": {},
            "preference": {
                "style": preference.style,
                "pool": list(preference.pool),
                "note": preference.note,
                "event_id": preference.event_id,
                "created_at": at.isoformat(),
                "weight_version": preference.weight_version,
            },
            "weight_spans": np.array([[start, 0, tokens["n"]]], "<i4").tobytes(),
            "rationale": f"Reads as {style}; wanted {preference.style}." if marks else None,
            "judge_model": "offline/archetypes" if marks else None,
            "judge_latency_s": 0.012 if marks else None,
            "judge_cost": 0.0 if marks else None,
            "judge_raw": json.dumps({"style": style, "quality": quality}) if marks else None,
        }
        batch.append((short, details, {"seq": seq, **tokens["arrays"]}))
        value += 0.12 * (reward - value)
        if len(batch) == CHUNK:
            _flush(engine, batch, made, seq)
    _flush(engine, batch, made, count)
    if count:
        store.add_event("pause", {"reason": "operator"}, weight_version=version // 2)
        store.add_event("resume_learning", {}, weight_version=version // 2)
        store.set_checkpoint(version, f"/runs/demo/checkpoints/v{version}")
        store.set_published(version)
        if version > 10:
            store.pin(version // 2)
            store.set_checkpoint(version // 2, f"/runs/demo/checkpoints/v{version // 2}")
    engine.dispose()
    store.close()


def _flush(engine: sa.Engine, batch: list[Any], made: list[dict[str, Any]], seq: int) -> None:
    with engine.begin() as conn:
        if batch:
            for table, rows in zip(
                (rollouts, rollout_details, rollout_tokens), zip(*batch, strict=True), strict=True
            ):
                conn.execute(table.insert(), list(rows))
        if made:
            conn.execute(versions.insert(), made)
        conn.execute(counters.update().where(counters.c.name == "rollouts").values(value=seq))
    batch.clear()
    made.clear()


def _set_time(store: RolloutStore, event_id: int, at: datetime) -> None:
    from online_sao.store.models import events

    with store._engine.connect().execution_options(online_sao_write=True) as conn, conn.begin():
        conn.execute(events.update().where(events.c.id == event_id).values(created_at=at))


def _version(
    number: int, run_id: str, at: datetime, metrics: dict[str, Any], kind: str = "update"
) -> dict[str, Any]:
    return {
        "version": number,
        "parent": number - 1 if number else None,
        "run_id": run_id,
        "kind": kind,
        "metrics": metrics,
        "created_at": at + timedelta(seconds=2),
        "published_at": at + timedelta(seconds=2.2),
        "checkpoint": None,
        "pinned": False,
        "abandoned": False,
    }


def _tokens(
    rng: np.random.Generator, style: str, index: int, value: float, reward: float, trained: bool
) -> dict[str, Any]:
    text = TEXTS[style].format(TOPICS[index % len(TOPICS)])
    ids = np.array([WORDS[word] for word in text.split()], "<i4")
    n = len(ids)
    arrays: dict[str, Any] = {
        "prompt_token_ids": np.arange(48, dtype="<i4").tobytes(),
        "token_ids": ids.tobytes(),
        "behavior_logprobs": -rng.exponential(0.4, n).astype("<f4"),
    }
    arrays["behavior_logprobs"] = arrays["behavior_logprobs"].tobytes()
    if trained:
        values = np.clip(value + np.linspace(0, 0.3 * (reward - value), n), 0, 1)
        values = values + rng.normal(0, 0.02, n)
        ratios = np.exp(rng.normal(0, 0.05, n))
        if index % 5 == 0:
            ratios[n // 2] = 7.2  # outside the trust region
        arrays["values"] = values.astype("<f4").tobytes()
        arrays["advantages"] = (reward - values).astype("<f4").tobytes()
        arrays["importance_ratios"] = ratios.astype("<f4").tobytes()
    else:
        arrays |= {"values": None, "advantages": None, "importance_ratios": None}
    return {"n": n, "text": text, "arrays": arrays}


def _metrics(
    rng: np.random.Generator, value: float, reward: float, lag: int, index: int, count: int
) -> dict[str, Any]:
    drift = 0.5 * (1 - np.exp(-3 * (index % max(count // 3, 1)) / max(count / 3, 1)))
    surprise = abs(reward - value)
    return {
        "policy/loss": float(rng.normal(0, 0.1)),
        "policy/masked_fraction": float(rng.random() < 0.1) * 0.025,
        "policy/importance_ratio_mean": float(rng.normal(1, 0.01)),
        "policy/importance_ratio_max": float(1 + rng.exponential(0.4)),
        "policy/logprob_gap": float(0.004 + rng.exponential(0.003)),
        "policy/k3_kl": float(rng.exponential(0.0005)),
        "policy/kl_to_start": float(max(0.0, drift + rng.normal(0, 0.1))),
        "policy/entropy": float(0.45 - 0.4 * drift + rng.normal(0, 0.04)),
        "policy/start_decay": 0.04 * max(0.0, float(value - reward)),
        "policy/grad_norm": float(0.4 + 8 * surprise * rng.random()),
        "policy/effective_sample_size": float(24 * np.exp(-rng.exponential(0.01))),
        "advantage/mean": float(reward - value),
        "advantage/abs_mean": float(surprise),
        "critic/loss": float(surprise**2 / 2),
        "critic/value_first": float(value),
        "critic/value_mean": float(value),
        "critic/value_target_mean": float(reward),
        "critic/explained_variance": None if index < 8 else float(np.tanh(index / count) * 0.5),
        "critic/grad_norm": float(0.3 + 60 * surprise * rng.random()),
        "rollout/reward": float(reward),
        "rollout/num_action_tokens": float(20 + rng.integers(0, 8)),
        "rollout/policy_lag_max": float(lag),
        "seconds/batch": 0.01,
        "seconds/policy": float(0.55 + rng.normal(0, 0.03)),
        "seconds/anchor": float(0.2 + rng.normal(0, 0.01)),
        "seconds/critic": float(0.8 + rng.normal(0, 0.04)),
        "seconds/optimizer": 0.09,
        "seconds/total": float(1.7 + rng.normal(0, 0.05)),
    }


def write_runs(folder: Path) -> None:
    """Results as simulations leave them: two presets, equally good, over three seeds each."""
    from online_sao.scenario import load_scenario, write_results

    definition = Path(__file__).parents[2] / "scenarios" / "preference_shift.toml"
    pace = 30  # rollouts until half of the answers have followed a switch
    for number_of_preset, preset in enumerate(("sao", "running_mean")):
        for seed in range(3):
            scenario = load_scenario(definition).replace(seed=seed, phase_rollouts=80)
            rng = np.random.default_rng([seed, number_of_preset])
            rows: list[dict[str, Any]] = []
            before = None
            for number, phase in enumerate(scenario.phases):
                half = pace * rng.uniform(0.8, 1.2)
                for position in range(phase.rollouts):
                    won = 1 / (1 + np.exp(-(position - half) / 6))
                    if rng.random() < 0.04 + 0.9 * won:
                        seen = phase.style
                    else:
                        seen = before or str(rng.choice(phase.pool))
                    match = float(seen == phase.style)
                    rows.append(
                        {
                            "index": len(rows) + 1,
                            "phase": number,
                            "detected_style": seen,
                            "quality": 1.0,
                            "style_mark": match,
                            "reward": match,
                            "state": "trained",
                            "num_action_tokens": 40,
                            "masked_fraction": 0.002,
                            "elapsed_s": SECONDS_APART * len(rows),
                        }
                    )
                before = phase.style
            write_results(
                folder / f"{preset}-seed{seed}", scenario, rows, [], preset=preset, complete=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--rollouts", type=int, default=450)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="write a tokenizer.json here")
    parser.add_argument("--runs", type=Path, help="write results of simulations here")
    arguments = parser.parse_args()
    started = time.monotonic()
    generate(arguments.url, arguments.rollouts, seed=arguments.seed)
    if arguments.tokenizer:
        write_tokenizer(arguments.tokenizer)
    if arguments.runs:
        write_runs(arguments.runs)
    print(f"{arguments.rollouts} rollouts in {time.monotonic() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
