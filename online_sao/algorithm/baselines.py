"""Memories of past rewards, for the methods that have no critic.

Each says what it expected before it sees a reward: call `baseline` first, `observe` after,
or the reward is compared with itself. All are bounded. `state_dict` returns plain numbers,
strings, lists and dicts, so that a checkpoint can hold it as JSON; `load_state_dict` takes it
back into an object made with the same settings (with a smaller window or bound, the oldest
entries are dropped). A prompt's key is a string, such as a hash of its token ids.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any


class RunningMean:
    """Mean of the previous `window` rewards, over all prompts (paper, section 4.5: 128)."""

    def __init__(self, window: int):
        self._rewards: deque[float] = deque(maxlen=_at_least_one("window", window))

    def baseline(self) -> float | None:
        """The mean, or None before the first reward."""
        return statistics.fmean(self._rewards) if self._rewards else None

    def observe(self, reward: float) -> None:
        self._rewards.append(_finite("reward", reward))

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self._rewards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rewards = deque(state["rewards"], maxlen=self._rewards.maxlen)


class PerPromptRunningMean:
    """Mean of the previous `window` rewards of the same prompt (paper, section 4.3: 8).

    At most `max_prompts` are remembered; the one observed longest ago is forgotten first.
    """

    def __init__(self, window: int, max_prompts: int = 10_000):
        self._window = _at_least_one("window", window)
        self._max_prompts = _at_least_one("max_prompts", max_prompts)
        self._rewards: OrderedDict[str, deque[float]] = OrderedDict()

    def baseline(self, key: str) -> float | None:
        """The prompt's mean, or None at its first visit."""
        rewards = self._rewards.get(key)
        return statistics.fmean(rewards) if rewards else None

    def observe(self, key: str, reward: float) -> None:
        reward = _finite("reward", reward)
        self._rewards.setdefault(key, deque(maxlen=self._window)).append(reward)
        _keep_newest(self._rewards, key, self._max_prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": [[key, list(rewards)] for key, rewards in self._rewards.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        newest: Iterable[Any] = state["rewards"][-self._max_prompts :]
        self._rewards = OrderedDict((key, deque(r, maxlen=self._window)) for key, r in newest)


class SPOTracker:
    """SPO's estimate of each prompt's reward, a Beta posterior that forgets as the policy moves.

    v = a / (a + b);  ρ = clamp(2^(−KL/D_half), ρ_min, ρ_max);  a ← ρ·a + R,  b ← ρ·b + 1 − R

    A prompt's first reward R₀ starts its tracker: a = N₀·R₀, b = N₀·(1 − R₀) with
    N₀ = 1/(1 − ρ_min), the weight that a tracker has settled at when it forgets fastest.
    At most `max_prompts` are remembered; the one observed longest ago is forgotten first.
    """

    def __init__(
        self, rho_min: float, rho_max: float, kl_half_life: float, max_prompts: int = 10_000
    ):
        if not 0 < rho_min <= rho_max < 1:
            raise ValueError(f"need 0 < rho_min <= rho_max < 1, not {rho_min} and {rho_max}")
        if not kl_half_life > 0:
            raise ValueError(f"kl_half_life must be positive, not {kl_half_life}")
        self._rho_min, self._rho_max = rho_min, rho_max
        self._kl_half_life = kl_half_life
        self._max_prompts = _at_least_one("max_prompts", max_prompts)
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def baseline(self, key: str) -> float | None:
        """v of the prompt, or None at its first visit."""
        if key not in self._counts:
            return None
        a, b = self._counts[key]
        return a / (a + b)

    def observe(self, key: str, reward: float, kl: float) -> None:
        """`reward` in [0, 1]; `kl` in nats per token between the policy at the prompt's last
        visit and now (not read at the first visit). Raises ValueError for a reward outside,
        or a kl that is NaN or negative."""
        if not 0 <= reward <= 1:
            raise ValueError(f"SPO needs rewards in [0, 1], not {reward}")
        if key in self._counts:
            if not kl >= 0:
                raise ValueError(f"kl must be at least 0, not {kl}")
            rho = min(max(2 ** (-kl / self._kl_half_life), self._rho_min), self._rho_max)
            a, b = self._counts[key]
            self._counts[key] = (rho * a + reward, rho * b + 1 - reward)
        else:
            weight = 1 / (1 - self._rho_min)
            self._counts[key] = (weight * reward, weight * (1 - reward))
        _keep_newest(self._counts, key, self._max_prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": [[key, a, b] for key, (a, b) in self._counts.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        newest: Iterable[Any] = state["counts"][-self._max_prompts :]
        self._counts = OrderedDict((key, (a, b)) for key, a, b in newest)


class WindowedScale:
    """Spread of the last `window` advantages, to divide new ones by.

    A method that normalises over a batch has no batch at one rollout per update, so the
    spread is taken over past rollouts. Call `scale` before `observe`, as with baselines.
    """

    MIN_SAMPLES = 8
    """With fewer, the spread is too uncertain to divide by."""
    MIN_SCALE = 0.1
    """Rewards lie in [0, 1]: after a long calm the first surprise is enlarged tenfold at most."""

    def __init__(self, window: int):
        self._samples: deque[float] = deque(maxlen=_at_least_one("window", window))

    def scale(self) -> float:
        """Standard deviation of the window (divided by its size), at least MIN_SCALE.

        1.0 with fewer than MIN_SAMPLES samples or when all are equal.
        """
        if len(self._samples) < self.MIN_SAMPLES or min(self._samples) == max(self._samples):
            return 1.0
        return max(statistics.pstdev(self._samples), self.MIN_SCALE)

    def observe(self, x: float) -> None:
        self._samples.append(_finite("advantage", x))

    def state_dict(self) -> dict[str, Any]:
        return {"samples": list(self._samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._samples = deque(state["samples"], maxlen=self._samples.maxlen)


def _keep_newest(entries: OrderedDict[str, Any], key: str, bound: int) -> None:
    entries.move_to_end(key)
    while len(entries) > bound:
        entries.popitem(last=False)


def _at_least_one(name: str, number: int) -> int:
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def _finite(name: str, number: float) -> float:
    # One NaN would stay in the mean for a whole window.
    if not math.isfinite(number):
        raise ValueError(f"the {name} must be finite, not {number}")
    return float(number)
