"""Held-out probes: does the policy still write well, does the judge still judge?

Every `guards.probe_every` versions the same held-out prompts are answered by what is served
then, and the judge is shown a few answers that were made to be worthless. Neither is ever
trained on. The results go to the loop's guards, so that reward hacking shows: training reward
up, held-out quality down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from online_sao.config import Config
from online_sao.errors import OnlineSAOError
from online_sao.judging import FORGERIES
from online_sao.learner.guards import ProbeResult
from online_sao.store import RolloutStore
from online_sao.types import JudgeState, Preference, Rollout
from online_sao.writing import build_messages, load_topics

log = logging.getLogger(__name__)

POLL_S = 0.5
JUDGED_WITHIN_S = 300.0  # a round whose verdicts take longer counts without them

Messages = list[dict[str, str]]


class Prober:
    """One thread beside the learner's. `ask` answers prompts and returns the rollouts' ids;
    `judge_forgeries` returns the rewards of the worthless answers (judging.FORGERIES), without
    those that the judge gave no verdict on."""

    def __init__(
        self,
        config: Config,
        store: RolloutStore,
        current_version: Callable[[], int],
        ask: Callable[[Sequence[Messages]], Sequence[str]],
        judge_forgeries: Callable[[Preference], Sequence[float]],
        report: Callable[[ProbeResult], None],
    ) -> None:
        self._every = config.guards.probe_every
        self._num_prompts = config.guards.probe_prompts
        self._topics = config.service.topics
        self._store = store
        self._current_version = current_version
        self._ask = ask
        self._judge_forgeries = judge_forgeries
        self._report = report
        self._next: int | None = None  # version from which the next round is due

    @property
    def is_on(self) -> bool:
        return self._every > 0 and self._topics is not None

    def run(self, ended: threading.Event) -> None:
        """Rounds until `ended`. What goes wrong costs a round, never the learner."""
        if not self.is_on:
            return
        while not ended.is_set():
            version = self._current_version()
            if self._next is None or version >= self._next:
                self._next = version + self._every
                try:
                    result = self._round(version, ended)
                    if not ended.is_set():
                        self._report(result)
                except Exception as error:  # Ray's, Serve's and the store's have no common base
                    log.warning(
                        "a round of probes failed: %s: %s",
                        type(error).__name__,
                        error,
                        extra={"weight_version": version},
                    )
            ended.wait(POLL_S)

    def _round(self, version: int, ended: threading.Event) -> ProbeResult:
        preference = self._store.preference()
        if preference is None:
            raise OnlineSAOError("There is no preference yet; set one.")
        ids = self._ask(self.prompts(preference))
        rewards = self._judge_forgeries(preference)
        rollouts = [r for r in self._judged(ids, ended) if r.verdict is not None]
        qualities = [r.verdict.quality for r in rollouts if r.verdict]
        return ProbeResult(
            version=version,
            num_answers=len(rollouts),
            quality=_mean([quality for quality in qualities if quality is not None]),
            reward=_mean([r.verdict.reward for r in rollouts if r.verdict]),
            # Of one that got a mark nothing is said about the others.
            forgeries_rewarded=_mean([float(reward > 0) for reward in rewards])
            if len(rewards) >= len(FORGERIES) / 2
            else None,
        )

    def prompts(self, preference: Preference) -> list[Messages]:
        """The same in every round under one pool, on topics that are never trained on."""
        assert self._topics is not None
        topics = load_topics(self._topics)
        chosen = topics.heldout[: self._num_prompts]
        return [
            build_messages(topic, preference.pool, f"probe/{number}", topics=topics)
            for number, topic in enumerate(chosen)
        ]

    def _judged(self, ids: Sequence[str], ended: threading.Event) -> list[Rollout]:
        deadline = time.monotonic() + JUDGED_WITHIN_S
        while True:
            rollouts = self._store.get_many(list(ids))
            waiting = any(rollout.judge_state is JudgeState.WAITING for rollout in rollouts)
            if not waiting or ended.is_set() or time.monotonic() > deadline:
                return rollouts
            ended.wait(POLL_S)


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
