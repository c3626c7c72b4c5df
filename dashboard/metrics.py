"""What each logged metric means to an operator. One line of text per chart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    key: str
    title: str
    reading: str  # how to read it, one sentence
    unit: str = ""
    log: bool = False
    zero: bool = True  # the axis begins at 0


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
            ),
            Metric(
                "critic/value_first",
                "V at the first token",
                "The reward the critic expects before an answer begins; it should follow the mean "
                "reward within a few dozen rollouts.",
            ),
            Metric(
                "critic/surprise",
                "Surprise",
                "Moving mean of V minus reward: far above 0 right after a switch, then back to 0.",
                zero=False,
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
            ),
            Metric(
                "policy/entropy",
                "Entropy",
                "How freely the next token is chosen; near 0 the policy says one thing only and "
                "cannot follow a switch.",
                "nats per token",
            ),
            Metric(
                "rollout/num_action_tokens",
                "Answer length",
                "Tokens per answer; a sudden climb or collapse often means that the judge is "
                "being gamed.",
                "tokens",
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
            ),
            Metric(
                "policy/masked_fraction",
                "Masked fraction",
                "Share of tokens outside the trust region, which teach nothing; above 0.1 the "
                "answers are too old or the steps too large.",
            ),
            Metric(
                "rollout/policy_lag_max",
                "Policy lag",
                "Versions between the weights that wrote an answer and those that learn from it; "
                "beyond the line it is not learned from.",
                "versions",
            ),
            Metric(
                "policy/effective_sample_size",
                "Effective sample size",
                "1 when every token counts the same; well below it a few tokens carry the update.",
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
        ),
    ),
)
