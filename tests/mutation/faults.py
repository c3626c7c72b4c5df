"""Deliberate faults, each of which some test must notice (run.py).

A fault replaces `old` by `new` in `file`; `old` must occur there exactly once, so that a
fault cannot go stale unnoticed. `tests` are the files, or test ids, that are run on it.
To add some, append to FAULTS. A fault must change behaviour: if a test cannot be written
that tells it from the original, it is not a fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # from the root of the repository
    old: str
    new: str
    tests: tuple[str, ...]


def _algorithm(module: str, *faults: tuple[str, str, str]) -> list[Fault]:
    file, test = f"online_sao/algorithm/{module}.py", f"tests/algorithm/test_{module}.py"
    return [Fault(name, file, old, new, (test,)) for name, old, new in faults]


FAULTS: list[Fault] = [
    *_algorithm(
        "statistics",
        (
            "mask by multiplication, so that NaN leaks",
            "x.masked_fill(~mask, 0.0).sum()",
            "(x * mask).sum()",
        ),
        (
            "mean over all positions instead of the mask",
            "mask.sum().clamp(min=1)",
            "mask.numel()",
        ),
        (
            "mean over an empty mask divides by zero",
            "mask.sum().clamp(min=1)",
            "mask.sum()",
        ),
        ("explained variance of R + V", "(r - v).var()", "(r + v).var()"),
        (
            "explained variance defined although rewards do not vary",
            "r.numel() < 2 or bool((r == r[0]).all())",
            "r.numel() < 2",
        ),
    ),
    *_algorithm(
        "importance",
        (
            "ratio upside down",
            "policy_logprobs.float() - behavior_logprobs.float()",
            "behavior_logprobs.float() - policy_logprobs.float()",
        ),
        (
            "log-ratio subtracted in low precision",
            "policy_logprobs.float() - behavior_logprobs.float()",
            "(policy_logprobs - behavior_logprobs).float()",
        ),
        (
            "log-ratio without the mask",
            "return log_ratio.masked_fill(~action_mask, 0.0)",
            "return log_ratio",
        ),
        ("exp without a bound", "log_ratio.clamp(max=max_log_ratio).exp()", "log_ratio.exp()"),
        (
            "trust region: bounds swapped",
            "(log_ratio > lower) & (log_ratio < upper)",
            "(log_ratio > -upper) & (log_ratio < -lower)",
        ),
        ("trust region: lower bound closed", "(log_ratio > lower)", "(log_ratio >= lower)"),
        ("trust region: upper bound closed", "(log_ratio < upper)", "(log_ratio <= upper)"),
        ("trust region: no lower bound", "(log_ratio > lower) & ", ""),
        ("trust region: no upper bound", " & (log_ratio < upper)", ""),
        (
            "trust region: kept and masked tokens exchanged",
            "action_mask & (log_ratio > lower) & (log_ratio < upper)",
            "action_mask & ~((log_ratio > lower) & (log_ratio < upper))",
        ),
        ("trust region: action mask dropped", "return action_mask & (", "return ("),
        ("k3 of the reversed ratio", "d.expm1() - d", "(-d).expm1() + d"),
        ("k3 with its sign flipped", "d.expm1() - d", "d.expm1() + d"),
        ("effective sample size without the square", "(weights**2).sum()", "weights.sum()"),
    ),
    *_algorithm(
        "advantages",
        (
            "lambda without clamp",
            "action_mask.sum(-1).float())).clamp(0, 1)",
            "action_mask.sum(-1).float()))",
        ),
        (
            "lambda from the padded length",
            "(alpha * action_mask.sum(-1).float())",
            "(alpha * torch.ones_like(action_mask).sum(-1).float())",
        ),
        (
            "TD error with its sign flipped",
            "gamma * _next(v) - v\n",
            "gamma * _next(v) + v\n",
        ),
        ("bridge off by one: V of the same token", "return pad(v[:, 1:], (0, 1))", "return v"),
        (
            "bridge off by one: V of the token after the next",
            "return pad(v[:, 1:], (0, 1))",
            "return pad(v[:, 2:], (0, 2))",
        ),
        (
            "bridge to the observation behind the action",
            "gamma * _next(v) - v\n",
            "gamma * _compact(values, (order + 1).clamp(max=values.shape[1] - 1), present) - v\n",
        ),
        (
            "observation tokens in the recursion",
            "order, present = _actions_first(action_mask)\n"
            "    v = _compact(values, order, present)\n"
            "    td_errors",
            "order, present = _actions_first(torch.ones_like(action_mask))\n"
            "    v = _compact(values, order, present)\n"
            "    td_errors",
        ),
        (
            "gamma forgotten in the recursion",
            "_sum_from_the_end(td_errors, gamma * _per_row(gae_lambda, v))",
            "_sum_from_the_end(td_errors, _per_row(gae_lambda, v))",
        ),
        (
            "lambda forgotten in the recursion",
            "_sum_from_the_end(td_errors, gamma * _per_row(gae_lambda, v))",
            "_sum_from_the_end(td_errors, gamma * torch.ones_like(v[:, 0]))",
        ),
        (
            "the lambda of the first row used for all",
            ".expand(like.shape[0])",
            ".reshape(-1)[:1].expand(like.shape[0])",
        ),
        (
            "a bootstrap behind the end",
            "running = torch.zeros_like(factor)",
            "running = torch.ones_like(factor)",
        ),
        ("value targets: lambda for 1 − lambda", "(1 - lambdas)[:, None]", "lambdas[:, None]"),
        ("value targets: no 1 − lambda", "gamma * (1 - lambdas)[:, None] *", "gamma *"),
        ("gradient through the advantage", "x.detach().double()", "x.double()"),
        ("padding in the recursion", ".masked_fill(~present, 0.0)", ""),
        (
            "results outside the mask",
            "compact.float()).masked_fill(~action_mask, 0.0)",
            "compact.float())",
        ),
        (
            "step level: lambda from tokens instead of steps",
            "length_adaptive_lambda(has_step, alpha)",
            "length_adaptive_lambda(action_mask, alpha)",
        ),
        (
            "step level: sum of the values instead of the mean",
            "_sum_per_step(v, step) / tokens_per_step.clamp(min=1)",
            "_sum_per_step(v, step)",
        ),
        (
            "step level: first token instead of the last",
            "pad(followed, (0, 1))",
            "pad(followed, (1, 0))",
        ),
        (
            "step level: actions left out keep their number",
            "return (starts.cumsum(1) - 1).clamp(min=0), starts.sum(1)",
            "return action_index.clamp(0, action_index.shape[1] - 1), starts.sum(1)",
        ),
        (
            "one advantage copied to observation tokens too",
            "copied.masked_fill(~action_mask, 0.0)",
            "copied",
        ),
        ("group: mean not removed", "((r - r.mean()) /", "(r /"),
        ("group: another definition of the spread", "r.std(correction=0)", "r.std()"),
    ),
    *_algorithm(
        "baselines",
        (
            "running mean over everything",
            'self._rewards: deque[float] = deque(maxlen=_at_least_one("window", window))',
            'self._rewards: deque[float] = deque(maxlen=_at_least_one("window", 10**9))',
        ),
        (
            "one running mean for all prompts",
            "self._rewards.setdefault(key, deque",
            'self._rewards.setdefault(key[:0] or "a", deque',
        ),
        ("the newest prompt forgotten first", "popitem(last=False)", "popitem(last=True)"),
        ("prompts never forgotten", "while len(entries) > bound:", "while False:"),
        ("SPO: success and failure exchanged", "return a / (a + b)", "return b / (a + b)"),
        ("SPO: memory grows as the policy moves", "2 ** (-kl /", "2 ** (kl /"),
        (
            "SPO: forgetting without bounds",
            "min(max(2 ** (-kl / self._kl_half_life), self._rho_min), self._rho_max)",
            "2 ** (-kl / self._kl_half_life)",
        ),
        ("SPO: failures not forgotten", "rho * b + 1 - reward", "b + 1 - reward"),
        (
            "a scale from too few samples",
            "len(self._samples) < self.MIN_SAMPLES",
            "len(self._samples) < 2",
        ),
        (
            "a scale near zero",
            "max(statistics.pstdev(self._samples), self.MIN_SCALE)",
            "statistics.pstdev(self._samples)",
        ),
    ),
    *_algorithm(
        "objectives",
        ("policy loss with its sign flipped", "loss = -masked_sum(", "loss = masked_sum("),
        (
            "no stop-gradient at the ratio",
            "_ratio_weights(objective, log_ratio.detach(), usable, bounds)",
            "_ratio_weights(objective, log_ratio, usable, bounds)",
        ),
        (
            "no stop-gradient at the advantage",
            "advantages = advantages.detach().float()",
            "advantages = advantages.float()",
        ),
        (
            "loss divided by the tokens that are left after masking",
            "loss = -masked_sum(gains, usable) / (num_tokens if",
            "loss = -masked_sum(gains, usable) / ((usable & ~altered).sum().clamp(min=1) if",
        ),
        (
            "normalizer ignored",
            "loss = -masked_sum(gains, usable) / (num_tokens if normalizer is None else",
            "loss = -masked_sum(gains, usable) / (num_tokens if True else",
        ),
        (
            "observation tokens in the policy loss",
            "usable = action_mask & log_ratio.isfinite()",
            "usable = log_ratio.isfinite()",
        ),
        (
            "broken log-ratios let through",
            "usable = action_mask & log_ratio.isfinite() &",
            "usable = action_mask &",
        ),
        (
            "broken advantages let through",
            "log_ratio.isfinite() & advantages.isfinite()",
            "log_ratio.isfinite()",
        ),
        (
            "dis: trust region without effect",
            "trusted = trust_region_mask(log_ratio, usable, eps_low, eps_high)",
            "trusted = usable",
        ),
        (
            "dis: a gate of 0 and 1 in place of the ratio",
            "trusted = trust_region_mask(log_ratio, usable, eps_low, eps_high)\n"
            "        return ratio.",
            "trusted = trust_region_mask(log_ratio, usable, eps_low, eps_high)\n"
            "        return torch.ones_like(ratio).",
        ),
        ("icepop: lower bound open", "(ratio >= icepop_low)", "(ratio > icepop_low)"),
        ("icepop: upper bound open", "(ratio <= icepop_high)", "(ratio < icepop_high)"),
        ("tis: cut from below", "ratio.clamp(max=tis_cap)", "ratio.clamp(min=tis_cap)"),
        ("none: no ratio", "return ratio, torch.zeros_like", "return ratio**0, torch.zeros_like"),
        ("ppo_clip: the greater branch", "torch.minimum(", "torch.maximum("),
        (
            "ppo_clip: bounds swapped",
            "ratio.clamp(1 - eps_low, 1 + eps_high)",
            "ratio.clamp(1 - eps_high, 1 + eps_low)",
        ),
        (
            "masked fraction over all positions",
            "(altered | ~usable)[action_mask].sum()",
            "(altered | ~usable).sum()",
        ),
        ("value loss without the half", "errors.square().sum() / 2 /", "errors.square().sum() /"),
        (
            "value loss at observation positions",
            "targets.detach().float()).masked_fill(~action_mask, 0.0)",
            "targets.detach().float())",
        ),
        (
            "value loss moves its target",
            "errors = (values.float() - targets.detach().float())",
            "errors = (values.float() - targets.float())",
        ),
        (
            "value loss towards the mirrored target",
            "errors = (values.float() - targets",
            "errors = (values.float() + targets",
        ),
        ("entropy with its sign flipped", "return -(logprobs.exp()", "return (logprobs.exp()"),
        ("entropy of all tokens", "logits[mask].float()", "logits.float()"),
        (
            "divergence the other way round",
            "return (policy_logits.float().softmax(-1) * gap)",
            "return (reference_logits.float().softmax(-1) * -gap)",
        ),
        (
            "divergence moves its reference",
            "gap -= reference_logits.detach()",
            "gap -= reference_logits",
        ),
    ),
]
