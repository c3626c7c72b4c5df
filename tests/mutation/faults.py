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


def _learner(module: str, *faults: tuple[str, str, str]) -> list[Fault]:
    file, test = f"online_sao/learner/{module}.py", f"tests/learner/test_{module}.py"
    return [Fault(name, file, old, new, (test,)) for name, old, new in faults]


def _update(tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    file, test = "online_sao/learner/learner.py", f"tests/learner/test_learner.py::{tests}"
    return [Fault(name, file, old, new, (test,)) for name, old, new in faults]


def _checkpoint(tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    file, test = "online_sao/learner/checkpoint.py", f"tests/learner/test_checkpoint.py::{tests}"
    return [Fault(name, file, old, new, (test,)) for name, old, new in faults]


def _loop(tests: str, *faults: tuple[str, str, str]) -> list[Fault]:
    file, test = "online_sao/learner/loop.py", f"tests/learner/test_loop.py::{tests}"
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
        (
            "the other divergence weighted with the policy",
            "return (reference.exp() * gap)",
            "return (policy_logits.float().softmax(-1) * gap)",
        ),
        (
            "the other divergence moves its reference",
            "reference = reference_logits.detach()",
            "reference = reference_logits",
        ),
    ),
    *_algorithm(
        "start_decay",
        (
            "back when answers earn more than expected",
            "self._rate * (-mean_advantage",
            "self._rate * (mean_advantage",
        ),
        ("beyond the start weights", "min(1.0, self._coef", "max(0.0, self._coef"),
        (
            "away from the start weights",
            "max(0.0, self._average(mean_advantage))",
            "self._average(mean_advantage)",
        ),
        (
            "what is asked is remembered",
            "return min(1.0,",
            "self.observe(mean_advantage)\n        return min(1.0,",
        ),
        ("nothing is forgotten", "(-mean_advantage - self._shortfall)", "-mean_advantage"),
        (
            "a state that is not taken back",
            'self._shortfall = state["shortfall"]',
            "self._shortfall = 0.0",
        ),
    ),
    *_learner(
        "batch",
        ("state of the token itself", "return rows, columns - 1", "return rows, columns"),
        (
            "observations counted as actions",
            "np.full(len(observation), -1)",
            "np.full(len(observation), number)",
        ),
        (
            "reward on the first token instead of the last",
            "earned[-1] = rollout.reward",
            "earned[len(observation)] = rollout.reward",
        ),
        (
            "a turn may contradict its history",
            "if not np.array_equal(prompt[:length], seen):",
            "if False:",
        ),
        (
            "padding counted as tokens",
            "attention_mask[row, :n] = True",
            "attention_mask[row] = True",
        ),
        (
            "the temperature of the first turn for all",
            "np.full(num_actions, rollout.temperature)",
            "np.full(num_actions, trajectory[0].temperature)",
        ),
        (
            "a session's tokens given to each of its rollouts",
            "self.action_index[row] == action]",
            "self.action_index[row] >= 0]",
        ),
    ),
    *_learner(
        "parameters",
        (
            "masters not rounded into the model",
            "self.drop_gradients()\n        self._round()",
            "self.drop_gradients()",
        ),
        (
            "loaded masters not rounded into the model",
            "master.copy_(tensors[name])\n        self._round()",
            "master.copy_(tensors[name])",
        ),
        (
            "a second backward pass replaces the first",
            "master.grad += compute.grad",
            "master.grad = compute.grad.float()",
        ),
        (
            "a clip from too few norms",
            "len(self._norms) < CLIP_MIN_SAMPLES",
            "len(self._norms) < 1",
        ),
        (
            "norms remembered as clipped",
            "self._norms.append(grad_norm)",
            "self._norms.append(min(grad_norm, limit or grad_norm))",
        ),
        (
            "a decay toward nothing",
            "decay_target[name].to(master.dtype), decay",
            "torch.zeros_like(master), decay",
        ),
        (
            "a snapshot that moves along",
            "{name: tensor.clone() for name, tensor in self.masters().items()}",
            "self.masters()",
        ),
    ),
    *_learner(
        "policy",
        ("temperature forgotten", " / batch.temperature[batch.action_mask][:, None]", ""),
        (
            "an anchor that moves along",
            "return _action_logits(self._start.lm_head, self._start_decoder, batch)",
            "return _action_logits(self._start.lm_head, self._decoder, batch)",
        ),
        ("capped logits accepted", "        _check_head(self.model)\n", ""),
    ),
    *_learner(
        "fused_decoder",
        ("no causal mask", ".triu_(1)", ".triu_(length)"),
        ("rotated again, not back", "-shape.sin", "shape.sin"),
        (
            "gradient of the query not scaled",
            "(grad_scores @ key).mul_(scale)",
            "grad_scores @ key",
        ),
        (
            "norm weight left out",
            "(normed_2 * norm_2) @ layer.gate_up.T",
            "normed_2 @ layer.gate_up.T",
        ),
        ("gradient of the residual path lost", ".add_(residual)", ""),
        ("gradients of gate and up exchanged", "grads[6], grads[7]", "grads[7], grads[6]"),
        ("joined weights are a copy", "parameter.data = joined[start:end]", "pass"),
    ),
    *_learner(
        "critic",
        ("value of the state after the token", "[rows, columns]", "[rows, columns + 1]"),
        ("attention trained", "requires_grad_(name in trained)", "requires_grad_(True)"),
        ("router trained", 'if not _ROUTER.search(f".{rest}"):', "if True:"),
        ("a head that is not zero", "        nn.init.zeros_(self.head.weight)\n", ""),
        ("unknown roles accepted", "elif not _NORM.search(rest):", "elif False:"),
    ),
    *_learner(
        "estimators",
        (
            "one group for all prompts",
            "groups.setdefault(prompt_key(trajectory[0]), [])",
            'groups.setdefault("", [])',
        ),
        (
            "SPO: movement measured on the new answer",
            "self._moved(before)",
            "self._moved(trajectory[0])",
        ),
        (
            "normalised: a spread of what is normalised already",
            "rows = zip(raw, batch.action_mask, strict=True)",
            "rows = zip(raw / self._scale.scale(), batch.action_mask, strict=True)",
        ),
        (
            "first visit: the whole reward as advantage",
            "0.0 if expected is None else value - expected",
            "value if expected is None else value - expected",
        ),
        (
            "step level: the two poolings exchanged",
            '"mean" if config.advantage == "step_average" else "last"',
            '"last" if config.advantage == "step_average" else "mean"',
        ),
    ),
    *_update(
        "TestAgainstTheReference::test_three_updates_of_one_rollout",
        (
            "K critic updates less one",
            "range(self.config.critic_updates)",
            "range(self.config.critic_updates - 1)",
        ),
        (
            "V from after the update",
            "                values = critic_step.values\n                if",
            "                norm = self._critic_gradient(critic_step)\n"
            "                self._critic_steps(batch, critic_step, norm)\n"
            "                values = self.critic.values(batch).detach()\n"
            "                critic_step = self._critic_loss(batch)\n                if",
        ),
        (
            "the anchor pushes away",
            "term = term + config.kl_coef * pull",
            "term = term - config.kl_coef * pull",
        ),
        (
            "the direction of the anchor is ignored",
            'if config.kl_direction == "forward":',
            "if False:",
        ),
        (
            "an entropy bonus that is a penalty",
            "term = term - config.entropy_coef",
            "term = term + config.entropy_coef",
        ),
        (
            "the critic's learning rate for the policy",
            "self.config.policy_lr, policy_norm, decay",
            "self.config.critic_lr, policy_norm, decay",
        ),
    ),
    *_update(
        "TestOneUpdate",
        (
            "no decay",
            "self.config.policy_lr, policy_norm, decay,",
            "self.config.policy_lr, policy_norm, 0,",
        ),
        ("the decay does not remember", "        self._start_decay.observe(mean_advantage)\n", ""),
        (
            "warm-up ignored",
            "share = min(1.0, (self.num_updates + 1) / warmup) if warmup else 1.0",
            "share = 1.0",
        ),
        (
            "warm-up begins at nothing",
            "(self.num_updates + 1) / warmup",
            "self.num_updates / warmup",
        ),
        (
            "explained variance of values that know the rewards",
            "expected = critic_step.values if critic_step else None",
            "expected = values if critic_step else None",
        ),
    ),
    *_update(
        "TestRefused",
        (
            "a refused update still steps",
            "if not (math.isfinite(policy_norm) and math.isfinite(critic_norm)):",
            "if False:",
        ),
        (
            "tokens that are not finite let through",
            'if int(metrics["policy/non_finite_tokens"]):',
            "if False:",
        ),
        (
            "a refused update leaves the critic moved",
            "if self._critic_before is not None:",
            "if False:",
        ),
        (
            "a critic step that is not finite counts as one",
            "                return number\n",
            "                return self.config.critic_updates\n",
        ),
        (
            "what failed half-way is part of the next update",
            "            learner._undo()\n",
            "",
        ),
    ),
    *_update(
        "TestPretraining",
        (
            "a reward in its own baseline",
            "        advantages = self.estimator.advantages(batch, values)\n",
            "        self.estimator.observe(batch)\n"
            "        advantages = self.estimator.advantages(batch, values)\n",
        ),
        (
            "pretraining forgets the baselines",
            "            self.estimator.observe(make_batch([[rollout]], self.device))",
            "            pass",
        ),
    ),
    *_checkpoint(
        "TestDamage",
        ("checksums not looked at", 'if checksum != entry["checksum"]:', "if False:"),
        (
            "the state's checksum not looked at",
            'if state.pop("checksum", None) != _state_checksum(state):',
            'if state.pop("checksum", None) is None:',
        ),
    ),
    *_checkpoint(
        "TestRoundTrip",
        (
            "moments not loaded",
            '        parameters.load_optimizer_tensors(tensors[f"{part}_optimizer.safetensors"])\n',
            "",
        ),
        (
            "random state not restored",
            'torch.set_rng_state(torch.tensor(state["torch_rng"], dtype=torch.uint8))',
            "pass",
        ),
    ),
    *_checkpoint(
        "TestNoSpace",
        (
            "a half-written checkpoint left behind",
            "    except (OSError, SafetensorError) as error:\n"
            "        shutil.rmtree(partial, ignore_errors=True)\n",
            "    except (OSError, SafetensorError) as error:\n",
        ),
    ),
    *_checkpoint(
        "TestFolder",
        (
            "checkpoints that a guard keeps removed",
            "if version not in pinned and release(version):",
            "if release(version):",
        ),
        (
            "a pin that comes meanwhile overlooked",
            "if version not in pinned and release(version):",
            "if version not in pinned:",
        ),
    ),
    *_loop(
        "TestResume",
        (
            "nothing comes back after a crash",
            "self._lost.extend(self._store.rewind(-1 if parent is None else parent, self._run.id))",
            "pass",
        ),
        (
            "everything comes back after a crash",
            "self._store.rewind(-1 if parent is None else parent,",
            "self._store.rewind(-1,",
        ),
        (
            "what a crash took is too old when it comes back",
            '            "skipped": self._skipped,\n',
            "",
        ),
        ("what a crash took waits behind what is newer", "while self._lost:", "while False:"),
        (
            "a lost store goes unnoticed",
            "        self._refuse_unknown_checkpoints()\n",
            "",
        ),
    ),
    *_loop(
        "TestRollback",
        ("a crash undoes a rollback", "if ancestor != version:", "if False:"),
        (
            "what a rollback left pushes out what it went back to",
            "left = {v.version for v in self._store.retained_versions() if v.abandoned}",
            "left: set[int] = set()",
        ),
        (
            "a rollback leaves the rollouts of its line",
            "self._version = self._store.roll_back(version, self._run.id, self._epoch)",
            "self._version = self._store.next_version(); self._store.add_version("
            "WeightVersion(self._version, version, self._run.id, 'rollback'))",
        ),
    ),
    *_loop(
        "TestRefusals",
        (
            "a broken rollout takes the others along",
            '            self._set_aside(broken, "non_finite"',
            '            self._set_aside(ids, "non_finite"',
        ),
    ),
    *_loop(
        "TestControl",
        (
            "a pause without effect",
            "if self._pause_reason is not None:\n            return False",
            "if False:\n            return False",
        ),
    ),
    *_loop(
        "TestPublishing",
        (
            "every update published",
            "if time.monotonic() < self._next_publish:",
            "if False:",
        ),
    ),
    *_loop(
        "TestSessions",
        (
            "a session's turns learned from one by one",
            'if config.credit == "session":\n            trajectories =',
            'if config.credit == "nothing":\n            trajectories =',
        ),
    ),
    *_loop(
        "TestStoreOutage",
        ("a checkpoint of what the store does not know", " and not self._unrecorded", ""),
    ),
    Fault(
        "settings: the preset before the file",
        "online_sao/config.py",
        '{**preset_settings(name), **learner, "preset": name}',
        '{**learner, **preset_settings(name), "preset": name}',
        ("tests/test_config.py::TestPrecedence",),
    ),
    Fault(
        "settings: a group larger than an update",
        "online_sao/config.py",
        "self.rollouts_per_update % self.group_size",
        "self.rollouts_per_update < 1",
        ("tests/test_config.py::TestRefused",),
    ),
    Fault(
        "preparation without a lock",
        "online_sao/prepare.py",
        'with FileLock(folder / ".prepare.lock"):',
        "if True:",
        ("tests/test_prepare.py::TestPrepare",),
    ),
    Fault(
        "an interrupted warm start begins anew",
        "online_sao/prepare.py",
        'first = int(state.metadata()["step"])',
        "first = 0",
        ("tests/test_prepare.py::TestWarmStart",),
    ),
]
