"""What each logged metric means to an operator: how to read it, and where it stops being well.

A run that has guard rails recorded their bounds among its settings (`guards`), and those are
drawn; for a run without, the bounds here are: wide enough that an honest run, a switch
included, does not touch them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PER_MINUTE = "updates/per_minute"  # no metric of an update: from the times between them
ABANDONED = "abandoned"  # no metric either: whether a rollback left it behind
RECENT_UPDATES = 20  # updates whose mean is held against a bound
OURS = "the dashboard's"


@dataclass(frozen=True)
class Bound:
    """The mean over RECENT_UPDATES should lie between `low` and `high`, where they are set."""

    low: float | None = None
    high: float | None = None
    advice: str = ""  # what to do beyond it
    source: str = OURS

    def holds(self, mean: float) -> bool:
        return (self.low is None or mean >= self.low) and (self.high is None or mean <= self.high)

    def __str__(self) -> str:
        parts = [f"at least {self.low:g}"] if self.low is not None else []
        parts += [f"at most {self.high:g}"] if self.high is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Metric:
    key: str
    title: str
    reading: str  # how to read it, one sentence
    unit: str = ""
    log: bool = False
    zero: bool = True  # the axis begins at 0
    bound: Bound | None = None
    missing: str = "these updates did not record it"  # why there may be no number


@dataclass(frozen=True)
class Group:
    title: str
    metrics: tuple[Metric, ...]


GROUPS = (
    Group(
        "Does the critic know what to expect?",
        (
            Metric(
                "critic/explained_variance",
                "Explained variance",
                "Share of the reward's variance that V at the first token predicts, over the last "
                "128 rollouts: 0 is no better than the mean, below 0 worse; gaps mean all rewards "
                "were alike.",
                zero=False,
                bound=Bound(
                    low=-2.0,
                    advice="The critic misleads: pause, and lower learner.critic_lr.",
                ),
                missing="all rewards were alike, or there is no critic",
            ),
            Metric(
                "critic/value_first",
                "V at the first token",
                "The reward the critic expects before an answer begins; it should follow the mean "
                "reward within a few dozen rollouts.",
            ),
            Metric(
                "advantage/abs_mean",
                "Advantage, mean size",
                "How much there is to learn per token: near 0 all the time means that nothing is "
                "learned any more.",
            ),
        ),
    ),
    Group(
        "How far has the policy gone?",
        (
            Metric(
                "policy/kl_to_start",
                "KL to the start policy",
                "Distance from the weights it began with; a steady climb without a rise in reward "
                "is drift.",
                "nats per token",
                bound=Bound(
                    high=1.0,
                    advice="The policy has gone far from its start: roll back, and raise "
                    "learner.kl_coef or lower learner.policy_lr.",
                ),
                missing="the run has no anchor (learner.kl_coef is 0)",
            ),
            Metric(
                "policy/start_decay",
                "Decay toward the start",
                "Share of what was learned that an update gave up, because answers earn less than "
                "expected: a peak after a switch is wanted, small peaks all the time mean that the "
                "baseline does not follow.",
            ),
            Metric(
                "policy/entropy",
                "Entropy",
                "How freely the next token is chosen; near 0 the policy says one thing only and "
                "cannot follow a switch.",
                "nats per token",
                bound=Bound(
                    low=0.02,
                    advice="The policy says one thing only: roll back to a version from before "
                    "the fall, and raise learner.kl_coef.",
                ),
            ),
            Metric(
                "rollout/num_action_tokens",
                "Answer length",
                "Tokens per answer; a sudden climb or collapse often means that the judge is "
                "being gamed.",
                "tokens",
                bound=Bound(
                    low=2.0,
                    advice="Answers have all but vanished: roll back, and read under Rollouts "
                    "what the judge rewards.",
                ),
            ),
        ),
    ),
    Group(
        "Is it learning from its own answers?",
        (
            Metric(
                "policy/logprob_gap",
                "Train/rollout log-prob gap",
                "Mean difference between the engine's and the learner's log-probs: it should be "
                "small and flat; a climb means that the two no longer hold the same weights.",
                "nats per token",
                bound=Bound(
                    high=0.3,
                    advice="Engine and learner disagree about the same tokens: pause, and see "
                    "the service's log for failed publishes.",
                ),
            ),
            Metric(
                "policy/masked_fraction",
                "Masked fraction",
                "Share of tokens outside the trust region, which teach nothing; it climbs when "
                "answers are too old or steps too large.",
                bound=Bound(
                    high=0.25,
                    advice="Many tokens teach nothing: send fewer requests at a time, or lower "
                    "learner.policy_lr.",
                ),
            ),
            Metric(
                "rollout/policy_lag_max",
                "Delay (policy lag)",
                "Versions between the weights that wrote an answer and those that learn from it; "
                "beyond the line it is not learned from.",
                "versions",
            ),
            Metric(
                "policy/effective_sample_size",
                "Effective sample size",
                "Close to the answer length when every token counts the same; well below it a "
                "few tokens carry the update.",
                "tokens",
            ),
        ),
    ),
    Group(
        "How large are the steps?",
        (
            Metric(
                "policy/grad_norm",
                "Policy gradient norm",
                "Spikes belong to surprising answers; a level that keeps growing does not.",
                log=True,
                zero=False,
            ),
            Metric(
                "critic/grad_norm",
                "Critic gradient norm",
                "High for the rare, informative rollouts and low for expected ones.",
                log=True,
                zero=False,
            ),
        ),
    ),
    Group(
        "How fast is it?",
        (
            Metric(
                "seconds/total",
                "Seconds per update",
                "Should be flat; a climb means that another process takes the machine.",
                "s",
            ),
            Metric(
                PER_MINUTE,
                "Updates per minute",
                "Each learns from one answer, unless learner.rollouts_per_update says more; falls "
                "to 0 while nobody asks.",
                "per minute",
            ),
        ),
    ),
)


METRICS = {metric.key: metric for group in GROUPS for metric in group.metrics}


# The guard rail that watches a metric: its setting, and whether it bounds from above.
GUARDS = {
    "policy/kl_to_start": ("kl_to_start_max", True),
    "policy/entropy": ("entropy_min", False),
    "rollout/num_action_tokens": ("answer_tokens_min", False),
    "policy/logprob_gap": ("logprob_gap_max", True),
    "policy/masked_fraction": ("masked_fraction_max", True),
    "critic/explained_variance": ("explained_variance_min", False),
}


def bounds(config: Mapping[str, Any]) -> dict[str, Bound]:
    """The bound of each metric that has one, by its key.

    `config`: the run's settings as it recorded them. A guard rail that is switched off (None)
    leaves no bound.
    """
    found = {key: metric.bound for key, metric in METRICS.items() if metric.bound is not None}
    guards = config.get("guards") or {}
    for key, (setting, from_above) in GUARDS.items():
        if setting not in guards:
            continue
        limit = guards[setting]
        if limit is None:
            found.pop(key, None)
            continue
        found[key] = Bound(
            low=None if from_above else float(limit),
            high=float(limit) if from_above else None,
            advice=found[key].advice if key in found else "",
            source=f"guards.{setting}",
        )
    lag = (config.get("learner") or {}).get("max_policy_lag")
    if lag is not None:
        found["rollout/policy_lag_max"] = Bound(
            high=float(lag),
            advice="Answers come faster than the learner learns: send fewer at a time.",
            source="learner.max_policy_lag",
        )
    return found
