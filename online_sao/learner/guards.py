"""Guard rails: when does learning go wrong? Pure decisions, taken from windows of numbers.

A guard watches one number, mostly a mean over the last `window` trained rollouts, and fires
when it passes its bound. What is done then is the loop's part (`LearnerLoop`): record it, and
pause or roll back as `GuardConfig.action` says. After a firing all windows begin anew, so
whoever resumes has a whole window to see whether things mend.

Guards of the reward forget what they saw at a preference event and are silent for
`grace_rollouts` after it: there a drop is expected. The others stand: no preference asks for a
policy that repeats itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from online_sao.config import GuardConfig
from online_sao.types import IntArray, Rollout

REPETITION_TOKENS = 3  # a run of so many tokens that came before counts as repeated
# Standard errors by which the reward must have fallen to count: the best of many windows is high
# by chance alone.
REWARD_NOISE = 4.0
# A number that only some answers have is judged where at least this share of the window has it:
# the one answer that ended by itself must not speak for all that clients cut off.
PART_OF_WINDOW_MIN = 0.5
# Where nearly all rewards are the same, any critic explains less than nothing of their variance.
REWARD_VARIANCE_MIN = 0.05


@dataclass(frozen=True)
class Sample:
    """One trained rollout as the guards see it; `metrics` are of the update it was part of."""

    version: int  # that its update made
    preference_id: int  # the event that set the preference it was made under
    reward: float
    num_tokens: int
    cut_off: bool  # by the client's max_tokens: its length says nothing
    repetition: float
    prompt: bytes  # token ids
    answer: bytes
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class ProbeResult:
    """One round of held-out prompts: what is served, judged, and never trained on."""

    version: int  # that was current when the round began
    num_answers: int
    quality: float | None  # mean mark; None when the judge gave none
    reward: float | None
    forgeries_rewarded: float | None = None  # share of worthless answers that got a reward


@dataclass(frozen=True)
class Guard:
    """`setting` names the bound in GuardConfig; a value beyond it fires."""

    name: str
    setting: str
    is_upper: bool
    meaning: str  # what it says about the run, and where to look
    about_reward: bool = False
    rollback_helps: bool = True  # False: the weights are not what is wrong


@dataclass(frozen=True)
class Firing:
    """A guard passed its bound. `good_version` is the newest that is older than all it saw."""

    guard: Guard
    value: float
    bound: float
    good_version: int

    def describe(self) -> str:
        side = "above" if self.guard.is_upper else "below"
        return (
            f"guard {self.guard.name}: {self.value:.3g} is {side} {self.bound:g}; "
            f"{self.guard.meaning}"
        )


KL = Guard(
    "kl_to_start",
    "kl_to_start_max",
    True,
    "the policy has moved far from the start policy. Lower learner.policy_lr or raise kl_coef.",
)
ENTROPY = Guard(
    "entropy",
    "entropy_min",
    False,
    "the policy has become almost certain of every token, so nothing new is tried.",
)
ANSWER_TOKENS = Guard(
    "answer_tokens", "answer_tokens_min", False, "answers end as soon as they begin."
)
DISTINCT = Guard(
    "distinct_answers", "distinct_answers_min", False, "different prompts get the same answer."
)
REPETITION = Guard(
    "repetition", "repetition_max", True, "answers repeat themselves. Does the judge reward that?"
)
MASKED = Guard(
    "masked_fraction",
    "masked_fraction_max",
    True,
    "too many tokens lie outside the trust region. Lower learner.policy_lr or max_policy_lag.",
)
GAP = Guard(
    "logprob_gap",
    "logprob_gap_max",
    True,
    "learner and engine disagree about the same tokens. Lower learner.policy_lr or "
    "max_policy_lag, and see in /ready whether the weights that are served are current.",
)
EXPLAINED_VARIANCE = Guard(
    "explained_variance",
    "explained_variance_min",
    False,
    "the critic predicts worse than a constant would. Lower learner.critic_lr.",
    about_reward=True,
)
REWARD = Guard(
    "reward_drop",
    "reward_drop_max",
    True,
    "the reward has lost this share of its best level under the same preference.",
    about_reward=True,
)
PROBE_QUALITY = Guard(
    "probe_quality_drop",
    "probe_quality_drop_max",
    True,
    "held-out answers are worse than the start policy's, whatever the training reward says.",
)
FORGERIES = Guard(
    "forgeries",
    "forgeries_max",
    True,
    "the judge rewards answers that were made to be worthless. Mend the judge before you resume.",
    rollback_helps=False,
)
GUARDS = (
    KL,
    ENTROPY,
    ANSWER_TOKENS,
    DISTINCT,
    REPETITION,
    MASKED,
    GAP,
    EXPLAINED_VARIANCE,
    REWARD,
    PROBE_QUALITY,
    FORGERIES,
)


class GuardRails:
    """The windows, and what the guards say about them. One thread; knows no store."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._samples: deque[Sample] = deque(maxlen=config.window)
        self._rewards: deque[float] = deque(maxlen=config.window)
        self._probes: deque[ProbeResult] = deque(maxlen=config.probe_rounds)
        self._preference_id = 0
        self._since_event = 0
        # Before the first preference event of this process nothing has to settle.
        self._grace = 0
        self._best_reward = 0.0
        self._last_probe: ProbeResult | None = None
        self.reference: ProbeResult | None = None  # the first round with marks

    def observe(self, samples: Sequence[Sample]) -> Firing | None:
        """Take in the rollouts of one update; the first guard that fires, if any does."""
        for sample in samples:
            self._take(sample)
        if len(self._samples) < self._config.window:
            return None
        is_settled = self._since_event >= max(self._config.window, self._grace)
        if is_settled:
            self._best_reward = max(self._best_reward, _mean(self._rewards))
        before = self._samples[0].version - 1
        values = self.values()
        for guard in GUARDS:
            if guard in (PROBE_QUALITY, FORGERIES) or (guard.about_reward and not is_settled):
                continue
            firing = self._judge(guard, values[guard.name], before)
            if firing is not None:
                return self._fired(firing)
        return None

    def observe_probe(self, result: ProbeResult) -> Firing | None:
        """Take in a round of probes; the first guard that fires, if any does."""
        before = self._last_probe.version if self._last_probe else 0
        self._last_probe = result
        if result.quality is not None and self.is_enough(result.num_answers):
            self._probes.append(result)
            self.reference = self.reference or result
        if result.forgeries_rewarded is not None:
            firing = self._judge(FORGERIES, result.forgeries_rewarded, before)
            if firing is not None:
                return self._fired(firing)
        if len(self._probes) == self._config.probe_rounds:
            value = self.values()[PROBE_QUALITY.name]
            # The oldest round of the window may have been good still.
            firing = self._judge(PROBE_QUALITY, value, self._probes[0].version)
            if firing is not None:
                return self._fired(firing)
        return None

    def is_enough(self, num_answers: int) -> bool:
        """Whether so many answers of a round with marks speak for the round."""
        return num_answers >= PART_OF_WINDOW_MIN * self._config.probe_prompts

    def reset(self) -> None:
        """Forget the windows: other weights are in force, or a person has looked."""
        self._samples.clear()
        self._rewards.clear()
        self._probes.clear()
        self._since_event = 0
        self._best_reward = 0.0

    def values(self) -> dict[str, float | None]:
        """Each guard's number over what the windows hold now; None where there is none."""
        samples = list(self._samples)
        ended = [sample.num_tokens for sample in samples if not sample.cut_off]
        long = [s for s in samples if s.num_tokens >= self._config.distinct_min_tokens]
        enough = PART_OF_WINDOW_MIN * self._config.window
        last = self._last_probe
        return {
            KL.name: _metric_mean(samples, "policy/kl_to_start"),
            ENTROPY.name: _metric_mean(samples, "policy/entropy"),
            ANSWER_TOKENS.name: _mean(ended) if len(ended) >= enough else None,
            DISTINCT.name: distinct_share(long) if len(long) >= enough else None,
            REPETITION.name: _mean([s.repetition for s in samples]) if samples else None,
            MASKED.name: _metric_mean(samples, "policy/masked_fraction"),
            GAP.name: _metric_mean(samples, "policy/logprob_gap"),
            EXPLAINED_VARIANCE.name: _last(samples, "critic/explained_variance")
            if _variance(self._rewards) >= REWARD_VARIANCE_MIN
            else None,
            REWARD.name: self._reward_drop(),
            PROBE_QUALITY.name: self._quality_drop(),
            FORGERIES.name: last.forgeries_rewarded if last else None,
        }

    def status(self) -> dict[str, Any]:
        """What an operator sees: each guard's number beside its bound, and the probes."""
        values = self.values()
        last = self._last_probe
        return {
            "action": self._config.action,
            "window": self._config.window,
            "rollouts_seen": len(self._samples),
            "values": values,
            "bounds": {guard.name: self._bound(guard) for guard in GUARDS},
            "reward_mean": _mean(self._rewards) if self._rewards else None,
            "probe": {
                "version": last.version if last else None,
                "quality": last.quality if last else None,
                "reward": last.reward if last else None,
                "quality_at_first": self.reference.quality if self.reference else None,
            },
        }

    # --- inside

    def _take(self, sample: Sample) -> None:
        if sample.preference_id > self._preference_id:
            if self._preference_id:
                self._grace = self._config.grace_rollouts
                self._rewards.clear()
                self._best_reward = 0.0
                self._since_event = 0
            self._preference_id = sample.preference_id
        if sample.preference_id == self._preference_id:
            # A straggler of the preference before says nothing about this one.
            self._rewards.append(sample.reward)
            self._since_event += 1
        self._samples.append(sample)

    def _reward_drop(self) -> float | None:
        """Share that the windowed mean has lost of its best; None within the noise."""
        if not self._rewards:
            return None
        best, mean = self._best_reward, _mean(self._rewards)
        # Of rewards in [0, 1] none vary more than coins do.
        spread = best * (1 - best) + mean * (1 - mean)
        is_noise = best - mean <= REWARD_NOISE * math.sqrt(spread / len(self._rewards))
        return None if is_noise else 1 - mean / best

    def _quality_drop(self) -> float | None:
        qualities = [probe.quality for probe in self._probes if probe.quality is not None]
        if self.reference is None or self.reference.quality is None or not qualities:
            return None
        return self.reference.quality - _mean(qualities)

    def _bound(self, guard: Guard) -> float | None:
        bound: float | None = getattr(self._config, guard.setting)
        return bound

    def _judge(self, guard: Guard, value: float | None, before: int) -> Firing | None:
        bound = self._bound(guard)
        if self._config.action == "off" or bound is None or value is None:
            return None
        if value > bound if guard.is_upper else value < bound:
            return Firing(guard, value, bound, before)
        return None

    def _fired(self, firing: Firing) -> Firing:
        self.reset()
        return firing


def make_samples(
    version: int, rollouts: Sequence[Rollout], metrics: Mapping[str, float | None]
) -> list[Sample]:
    """The rollouts of the update that made `version`, with its metrics."""
    return [
        Sample(
            version=version,
            preference_id=rollout.preference.event_id if rollout.preference else 0,
            reward=rollout.reward or 0.0,
            num_tokens=len(rollout.token_ids),
            cut_off=rollout.finish_reason == "length",
            repetition=repeated_share(rollout.token_ids),
            prompt=rollout.prompt_token_ids.tobytes(),
            answer=rollout.token_ids.tobytes(),
            metrics=metrics,
        )
        for rollout in rollouts
    ]


def repeated_share(token_ids: IntArray) -> float:
    """Share of the runs of REPETITION_TOKENS tokens that came before in the same answer."""
    ids = token_ids.tolist()
    runs = list(zip(*(ids[start:] for start in range(REPETITION_TOKENS)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def distinct_share(samples: Sequence[Sample]) -> float | None:
    """Distinct answers per distinct prompt, at most 1: one prompt asked again may get its answer
    again. None where there are fewer than two prompts. (Short answers may well be the same, and
    are not to be among `samples`.)
    """
    prompts = {sample.prompt for sample in samples}
    if len(prompts) < 2:
        return None
    return min(1.0, len({sample.answer for sample in samples}) / len(prompts))


def _mean(numbers: Sequence[float] | deque[float]) -> float:
    return sum(numbers) / len(numbers)


def _variance(numbers: Sequence[float] | deque[float]) -> float:
    if not numbers:
        return 0.0
    mean = _mean(numbers)
    return sum((number - mean) ** 2 for number in numbers) / len(numbers)


def _metric_mean(samples: Sequence[Sample], name: str) -> float | None:
    found = [value for s in samples if (value := s.metrics.get(name)) is not None]
    return _mean(found) if found else None


def _last(samples: Sequence[Sample], name: str) -> float | None:
    return samples[-1].metrics.get(name) if samples else None
