"""SAO once more, slowly and plainly: one sequence at a time, no padding, no masks, sums written
as loops, gradients by autograd on the whole model. Shares no code with online_sao.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from transformers import AutoModel, AutoModelForCausalLM

from online_sao.config import LearnerConfig
from online_sao.types import Rollout


@dataclass
class Sequence:
    """A trajectory as a list of tokens, and its action tokens by position."""

    ids: list[int]
    positions: list[int] = field(default_factory=list)
    behavior: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # per action token
    temperatures: list[float] = field(default_factory=list)


def sequence(trajectory: list[Rollout]) -> Sequence:
    last = trajectory[-1]
    made = Sequence([*last.prompt_token_ids.tolist(), *last.token_ids.tolist()])
    for rollout in trajectory:
        n = len(rollout.token_ids)
        made.positions += [len(rollout.prompt_token_ids) + i for i in range(n)]
        made.behavior += rollout.behavior_logprobs.tolist()
        made.rewards += [0.0] * (n - 1) + [rollout.reward]
        made.temperatures += [rollout.temperature] * n
    return made


class Reference:
    def __init__(self, config: LearnerConfig, model: str) -> None:
        self.config = config

        def load(kind):
            return kind.from_pretrained(model, dtype=torch.float32).eval()

        self.policy, self.start = load(AutoModelForCausalLM), load(AutoModelForCausalLM)
        self.body = load(AutoModel)
        self.head = torch.nn.Linear(self.policy.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        trained = [
            parameter
            for name, parameter in self.body.named_parameters()
            if ".mlp." in name or config.critic_trainable == "all"
        ]
        settings = {"betas": config.adam_betas, "weight_decay": config.weight_decay}
        self.policy_optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=config.policy_lr, **settings
        )
        self.critic_optimizer = torch.optim.AdamW(
            [*trained, *self.head.parameters()], lr=config.critic_lr, **settings
        )
        self.updates = 0
        self.shortfall = 0.0

    def update(self, trajectories: list[list[Rollout]]) -> dict[str, object]:
        c = self.config
        sequences = [sequence(trajectory) for trajectory in trajectories]
        n = sum(len(s.positions) for s in sequences)

        values_before = [self.values(s) for s in sequences]
        if c.value_timing == "after":
            self.critic_steps(sequences, n)
            values = [self.values(s) for s in sequences]
        else:
            values = values_before

        loss = torch.zeros(())
        all_advantages, all_ratios, all_kl, all_entropy = [], [], 0.0, 0.0
        for s, v in zip(sequences, values, strict=True):
            advantages = self.advantages(v, s.rewards)
            logits = self.policy(torch.tensor([s.ids])).logits[0]
            with torch.no_grad():
                start_logits = self.start(torch.tensor([s.ids])).logits[0]
            ratios = []
            for i, t in enumerate(s.positions):
                log_pi = (logits[t - 1] / s.temperatures[i]).log_softmax(-1)
                log_start = (start_logits[t - 1] / s.temperatures[i]).log_softmax(-1)
                pi = log_pi.exp()
                log_ratio = log_pi[s.ids[t]] - s.behavior[i]
                loss = loss + self.token_loss(log_pi[s.ids[t]], log_ratio, advantages[i]) / n
                kl = (pi * (log_pi - log_start)).sum()
                pull = kl
                if c.kl_direction == "forward":
                    pull = (log_start.exp() * (log_start - log_pi)).sum()
                entropy = -(pi * log_pi).sum()
                loss = loss + c.kl_coef * pull / n - c.entropy_coef * entropy / n
                ratios.append(math.exp(min(20.0, log_ratio.item())))
                all_kl += kl.item() / n
                all_entropy += entropy.item() / n
            all_advantages.append(advantages)
            all_ratios.append(ratios)
        self.policy_optimizer.zero_grad()
        loss.backward()
        decay = self.decay([a for row in all_advantages for a in row])
        with torch.no_grad():
            for moved, start in zip(self.policy.parameters(), self.start.parameters(), strict=True):
                moved.copy_((1 - decay) * moved + decay * start)
        self.policy_optimizer.step()

        if c.value_timing == "before":
            self.critic_steps(sequences, n)
        self.updates += 1
        return {
            "values": values,
            "advantages": all_advantages,
            "ratios": all_ratios,
            "kl": all_kl,
            "entropy": all_entropy,
            "decay": decay,
        }

    def decay(self, advantages: list[float]) -> float:
        """The share of the way back to the start weights."""
        c = self.config
        newest = -sum(advantages) / len(advantages)
        self.shortfall = (1 - c.start_decay_rate) * self.shortfall + c.start_decay_rate * newest
        return min(1.0, c.start_decay * max(0.0, self.shortfall))

    def token_loss(self, log_pi, log_ratio, advantage):
        """Equation 1 for one token, by objective."""
        c = self.config
        r = log_ratio.clamp(max=20).exp()
        if c.objective == "ppo_clip":
            return -torch.minimum(r * advantage, r.clamp(1 - c.eps_low, 1 + c.eps_high) * advantage)
        weight = r.item()
        if c.objective == "dis" and not 1 - c.eps_low < weight < 1 + c.eps_high:
            weight = 0.0
        if c.objective == "icepop" and not c.icepop_low <= weight <= c.icepop_high:
            weight = 0.0
        if c.objective == "tis":
            weight = min(weight, c.tis_cap)
        return -weight * advantage * log_pi

    def advantages(self, values: list[float], rewards: list[float]) -> list[float]:
        """Equations 4 and 5, backwards over the action tokens."""
        c = self.config
        gae_lambda = min(1.0, max(0.0, 1 - 1 / (c.lambda_alpha * len(values))))
        found, later = [], 0.0
        for j in reversed(range(len(values))):
            following = values[j + 1] if j + 1 < len(values) else 0.0
            delta = rewards[j] + c.gamma * following - values[j]
            later = delta + c.gamma * gae_lambda * later
            found.append(later)
        return found[::-1]

    def targets(self, values: list[float], rewards: list[float]) -> list[float]:
        c = self.config
        found, later = [], 0.0
        for j in reversed(range(len(values))):
            following = values[j + 1] if j + 1 < len(values) else 0.0
            mixed = (1 - c.lambda_critic) * following + c.lambda_critic * later
            later = rewards[j] + c.gamma * mixed
            found.append(later)
        return found[::-1]

    def values(self, s: Sequence) -> list[float]:
        with torch.no_grad():
            return self.value_tensor(s).tolist()

    def value_tensor(self, s: Sequence) -> torch.Tensor:
        states = self.body(torch.tensor([s.ids])).last_hidden_state[0]
        return torch.stack([self.head(states[t - 1])[0] for t in s.positions])

    def critic_steps(self, sequences: list[Sequence], n: int) -> None:
        c = self.config
        warm = min(
            1.0, (self.updates + 1) / c.critic_warmup_updates if c.critic_warmup_updates else 1
        )
        for group in self.critic_optimizer.param_groups:
            group["lr"] = c.critic_lr * warm
        for _ in range(c.critic_updates):
            loss = torch.zeros(())
            for s in sequences:
                values = self.value_tensor(s)
                for value, target in zip(
                    values, self.targets(values.tolist(), s.rewards), strict=True
                ):
                    loss = loss + (value - target) ** 2 / 2 / n
            self.body.zero_grad()
            self.head.zero_grad()
            loss.backward()
            self.critic_optimizer.step()
