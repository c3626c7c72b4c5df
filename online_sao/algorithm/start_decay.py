"""How far an update leads the policy back to where it started. Ours, not the paper's."""

from __future__ import annotations


class StartDecay:
    """d = min(1, coef * max(0, s)), s the moving average of what answers earn less than expected.

    s <- s + rate * (-A - s), A an update's mean advantage. While the baseline is right, rewards
    that are merely noisy average out; after the preference has changed, s is near the reward
    of before until the baseline has learned so.
    """

    def __init__(self, coef: float, rate: float) -> None:
        self._coef = coef
        self._rate = rate
        self._shortfall = 0.0

    def share(self, mean_advantage: float) -> float:
        """d for an update with this mean advantage, in [0, 1]; nothing is remembered."""
        return min(1.0, self._coef * max(0.0, self._average(mean_advantage)))

    def observe(self, mean_advantage: float) -> None:
        """Remember an update that was made."""
        self._shortfall = self._average(mean_advantage)

    def _average(self, mean_advantage: float) -> float:
        return self._shortfall + self._rate * (-mean_advantage - self._shortfall)

    def state_dict(self) -> dict[str, float]:
        return {"shortfall": self._shortfall}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._shortfall = state["shortfall"]
