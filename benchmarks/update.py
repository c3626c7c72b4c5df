"""Seconds and memory of one update: ours, the least the machine allows, and alternatives.

    python benchmarks/update.py                        # ours, the limit, the plain version
    python benchmarks/update.py --trl-python TRL/bin/python
                                                       # and TRL, from its own environment
                                                       # (venv TRL; pip install trl)

Every contender is a process of its own that keeps its model loaded; they take turns, one
update each a round, so that what else happens on the machine happens to all of them. Medians
over rounds; ratios are what counts.

All compute in --dtype; default: what this machine is quick at, as for the service.

limit  the matrix products of the update alone, at its shapes, from memory that no cache holds,
       and the optimiser's pass over its parameters
ours   `Learner.update` as the service calls it
plain  the same method with transformers, autograd and AdamW, float32 weights, autocast to bfloat16
trl    TRL's GRPOTrainer: loss, backward and optimiser step on the same tokens. It has no critic,
       so it is to be compared with ours for the preset running_mean
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
Step = Callable[[], Any]


# --- contenders: each returns a function that makes one update


def make_ours(options: argparse.Namespace) -> Step:
    sys.path.insert(0, str(ROOT))
    from online_sao.config import Config
    from online_sao.learner.learner import Learner
    from online_sao.types import JudgeState, Rollout, RolloutState, StoredVerdict

    config = Config.load(
        None, preset=options.preset, overrides={"learner.compute_dtype": options.dtype}
    ).learner
    learner = Learner(config, options.model)
    draw = _tokens(options)
    number = 0

    def rollout() -> Rollout:
        nonlocal number
        number += 1
        prompt, answer, logprobs = draw()
        reward = float(number % 2)
        return Rollout(
            id=f"r{number}",
            response_id=f"r{number}",
            choice=0,
            prompt_token_ids=prompt,
            token_ids=answer,
            behavior_logprobs=logprobs,
            weight_spans=(),
            temperature=1.0,
            messages=None,
            answer="",
            finish_reason="stop",
            state=RolloutState.REWARDED,
            judge_state=JudgeState.SCORED,
            verdict=StoredVerdict(quality=1, style=int(reward), reward=reward),
        )

    def step() -> dict[str, float]:
        result = learner.update([[rollout()] for _ in range(options.batch)])
        assert result.applied
        return {k: v for k, v in result.metrics.items() if k.startswith("seconds/")}

    return step


def make_plain(options: argparse.Namespace) -> Step:
    """SAO as one would first write it: no shared forward, logits everywhere, autograd."""
    import torch
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    uses_critic = options.preset != "running_mean"
    policy, start = load(), load().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-5, betas=(0.9, 0.95), weight_decay=0)
    if uses_critic:
        critic = load().model
        head = torch.nn.Linear(critic.config.hidden_size, 1)
        for name, parameter in critic.named_parameters():
            parameter.requires_grad_(".mlp." in name)
        trained = [p for p in critic.parameters() if p.requires_grad] + list(head.parameters())
        critic_optimizer = torch.optim.AdamW(trained, lr=3e-5, betas=(0.9, 0.95), weight_decay=0)
    draw = _tokens(options)

    def step() -> None:
        rows = [draw() for _ in range(options.batch)]
        ids = torch.tensor([[*p.tolist(), *a.tolist()] for p, a, _ in rows])
        behavior = torch.tensor([row.tolist() for _, _, row in rows])
        start_of_answer = len(rows[0][0])
        actions = ids[:, start_of_answer:]

        def values() -> Any:
            states = critic(input_ids=ids, use_cache=False).last_hidden_state
            return head(states.float())[:, start_of_answer - 1 : -1, 0]

        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            advantages = torch.ones_like(behavior)
            if uses_critic:
                with torch.no_grad():
                    advantages = 1.0 - values()
            logits = policy(ids, use_cache=False).logits.float()
            logprobs = logits.log_softmax(-1)[:, start_of_answer - 1 : -1]
            with torch.no_grad():
                reference = start(ids, use_cache=False).logits.float().log_softmax(-1)
                reference = reference[:, start_of_answer - 1 : -1]
            chosen = logprobs.gather(-1, actions[..., None])[..., 0]
            ratio = (chosen - behavior).exp()
            kept = ((ratio > 0.7) & (ratio < 6)).float()
            kl = (reference.exp() * (reference - logprobs)).sum(-1)
            loss = (-(ratio * kept * advantages) + 0.1 * kl).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2 if uses_critic else 0):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
                critic_loss = ((values() - 1.0) ** 2).mean()
            critic_loss.backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()

    return step


def make_trl(options: argparse.Namespace) -> Step:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [1.0 for _ in completions],
        args=GRPOConfig(
            output_dir="/tmp/trl-bench",
            per_device_train_batch_size=2,
            num_generations=2,
            beta=0.2,
            bf16=options.dtype == "bfloat16",
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            learning_rate=5e-5,
            max_completion_length=options.answer,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["Rain."] * 8}),
        processing_class=AutoTokenizer.from_pretrained(options.model),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.95), weight_decay=0)
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        reference = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.eval()
    trainer.current_gradient_accumulation_steps = 1
    draw = _tokens(options)

    def step() -> None:
        rows = [draw() for _ in range(options.batch)]
        prompt = torch.tensor([p.tolist() for p, _, _ in rows])
        completion = torch.tensor([a.tolist() for _, a, _ in rows])
        ids = torch.cat([prompt, completion], 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            with torch.no_grad():
                found = trainer._get_per_token_logps_and_entropies(
                    reference, ids, torch.ones_like(ids), options.answer
                )
            inputs = {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": completion,
                "completion_mask": torch.ones_like(completion),
                "advantages": torch.ones(len(rows)),
                "num_items_in_batch": torch.tensor(completion.numel()),
                "old_per_token_logps": torch.tensor([row.tolist() for _, _, row in rows]),
                "ref_per_token_logps": found[0],
            }
            loss = trainer.compute_loss(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_limit(options: argparse.Namespace) -> Step:
    """The update's matrix products, each with weights that have left the caches."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model)
    hidden, inner, layers = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
    )
    size = hidden // config.num_attention_heads
    kv = config.num_key_value_heads * size
    tokens = options.batch * (options.prompt + options.answer)
    actions = options.batch * options.answer
    uses_critic = options.preset != "running_mean"
    steps = 2 if uses_critic else 0
    mlp = {(2 * inner, hidden): 1, (hidden, inner): 1}
    attention = {(hidden + 2 * kv, hidden): 1, (hidden, hidden): 1}

    dtype = getattr(torch, options.dtype)

    def weight(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, dtype=dtype)

    work: list[tuple[Any, Any, Any]] = []  # left, right, out of one product

    def products(shape: tuple[int, int], count: int, kinds: str, length: int) -> None:
        rows, columns = shape
        for _ in range(count):
            matrix = weight(rows, columns)
            states, grads = weight(length, columns), weight(length, rows)
            for kind in kinds:
                left, right = {
                    "f": (states, matrix.T),
                    "x": (grads, matrix),
                    "w": (grads.T, states),
                }[kind]
                out = torch.empty(left.shape[0], right.shape[1], dtype=dtype)
                work.append((left, right, out))

    for shape in (*mlp, *attention):
        products(shape, layers, "fxw", tokens)  # policy
        products(shape, layers, "f", tokens)  # anchor
        for _ in range(steps):
            products(shape, layers, "fxw" if shape in mlp else "fx", tokens)
    products((config.vocab_size, hidden), 1, "fxw", actions)
    products((config.vocab_size, hidden), 1, "f", actions)

    policy_size = layers * (3 * inner * hidden + hidden * (2 * hidden + 2 * kv))
    policy_size += config.vocab_size * hidden
    passes = [(policy_size, 1), (layers * 3 * inner * hidden, steps)]
    optimizers = []
    for numel, repeats in passes:
        if repeats:
            master = torch.nn.Parameter(torch.zeros(numel))
            master.grad = torch.zeros(numel)
            optimizers.append((torch.optim.AdamW([master], lr=1e-5, fused=True), repeats))
    flop = sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right, _ in work)

    def step() -> dict[str, float]:
        began = time.perf_counter()
        for left, right, out in work:
            torch.mm(left, right, out=out)
        products_s = time.perf_counter() - began
        for optimizer, repeats in optimizers:
            for _ in range(repeats):
                optimizer.step()
        return {"seconds/products": products_s, "GFLOP": flop / 1e9}

    return step


CONTENDERS = {"limit": make_limit, "ours": make_ours, "plain": make_plain, "trl": make_trl}


def _tokens(options: argparse.Namespace) -> Callable[[], tuple[Any, Any, Any]]:
    import numpy as np
    from transformers import AutoConfig

    rng = np.random.default_rng(0)
    end = min(40_000, AutoConfig.from_pretrained(options.model).vocab_size)

    def draw() -> tuple[Any, Any, Any]:
        return (
            rng.integers(100, end, options.prompt).astype(np.int32),
            rng.integers(100, end, options.answer).astype(np.int32),
            np.full(options.answer, -4.0, np.float32),
        )

    return draw


# --- the processes


def child(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    step = CONTENDERS[options.contender](options)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        parts = step() or {}
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"seconds": seconds, "peak_gib": peak, "parts": parts}), flush=True)


class Contender:
    def __init__(self, name: str, python: str, arguments: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, __file__, "--contender", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if name != "trl" else None,
            text=True,
        )
        self.results: list[dict[str, Any]] = []

    def wait_ready(self) -> None:
        self._read(lambda line: line.strip() == "ready")

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.results.append(json.loads(self._read(lambda line: line.startswith("{"))))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self, wanted: Callable[[str], bool]) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if wanted(line):
                return line
        raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")


def measure(names: list[str], options: argparse.Namespace, **sizes: Any) -> dict[str, Any]:
    arguments = ["--model", options.model, "--dtype", options.dtype]
    for key, value in sizes.items():
        arguments += [f"--{key}", str(value)]
    contenders = [
        Contender(name, options.trl_python if name == "trl" else sys.executable, arguments)
        for name in names
    ]
    for contender in contenders:
        contender.wait_ready()
    for number in range(options.rounds + options.warm):
        for contender in contenders:
            contender.go()
        print(f"\r{sizes}: round {number + 1}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for contender in contenders:
        contender.end()
    found = {}
    for contender in contenders:
        kept = contender.results[options.warm :]
        parts = {
            key.removeprefix("seconds/"): statistics.median(r["parts"][key] for r in kept)
            for key in kept[0]["parts"]
        }
        found[contender.name] = {
            "seconds": statistics.median(r["seconds"] for r in kept),
            "peak_gib": kept[-1]["peak_gib"],
            "parts": parts,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded model, prepared")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2, help="first rounds that do not count")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--quick", action="store_true", help="two sizes only")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--preset", default="sao", help=argparse.SUPPRESS)
    parser.add_argument("--prompt", type=int, default=90, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, default=40, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        child(options)
        return
    sys.path.insert(0, str(ROOT))
    from online_sao.config import native_dtype

    options.dtype = options.dtype or native_dtype()
    print(f"{options.dtype}\n")
    if options.model is None:
        from online_sao.config import EMBEDDED_MODEL
        from online_sao.prepare import resolve_model

        options.model = str(resolve_model(EMBEDDED_MODEL))
    sizes: list[tuple[str, int, int, int]] = [
        ("sao", 90, 40, 1),
        ("sao", 128, 64, 1),
        ("running_mean", 90, 40, 1),
    ]
    if not options.quick:
        sizes += [
            ("sao", 90, 32, 1),
            ("sao", 90, 128, 1),
            ("sao", 90, 512, 1),
            ("sao", 90, 40, 8),
        ]
    rows = []
    print(
        "| preset | prompt + answer | batch | limit, s | ours, s | limit / ours | peak, GiB |"
        " ours / plain | ours / TRL |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for preset, prompt, answer, batch in sizes:
        names = ["limit", "ours", "plain"]
        if options.trl_python and preset == "running_mean":
            names.append("trl")
        found = measure(names, options, preset=preset, prompt=prompt, answer=answer, batch=batch)
        limit, ours = found["limit"]["seconds"], found["ours"]["seconds"]
        trl = found.get("trl")
        print(
            f"| {preset} | {prompt} + {answer} | {batch} | {limit:.2f} | {ours:.2f} | "
            f"{limit / ours:.2f} | {found['ours']['peak_gib']:.1f} | "
            f"{ours / found['plain']['seconds']:.2f} | "
            f"{ours / trl['seconds']:.2f} |"
            if trl
            else f"| {preset} | {prompt} + {answer} | {batch} | {limit:.2f} | {ours:.2f} | "
            f"{limit / ours:.2f} | {found['ours']['peak_gib']:.1f} | "
            f"{ours / found['plain']['seconds']:.2f} | - |",
            flush=True,
        )
        rows.append({"preset": preset, "prompt": prompt, "answer": answer, "batch": batch} | found)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    parts = rows[0]["ours"]["parts"]
    print(
        "\nours at the first row, by part: "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    )


if __name__ == "__main__":
    main()
