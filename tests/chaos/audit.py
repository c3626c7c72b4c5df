"""What must hold of a store after any number of kills; each breach is one line.

The service may lose an answer that no client has got, and it may do an update again whose
weights were lost. It may not forget an answer that a client holds, learn twice from one on one
line of weights, or write a number that is not finite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from online_sao.learner.checkpoint import list_checkpoints, read_policy
from online_sao.store import RolloutStore
from online_sao.store.models import clean_text
from online_sao.types import Rollout, RolloutState, WeightVersion

S = RolloutState
WITH_REWARD = (S.REWARDED, S.CLAIMED, S.TRAINED)
WITH_REASON = (S.UNSCORED, S.EXCLUDED, S.STALE, S.DISCARDED)
PAGE = 1000


@dataclass
class Audit:
    answered: int = 0  # answers that a client got whole
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    non_finite: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.non_finite, *self.other]

    def line(self, kills: int) -> str:
        line = (
            f"{kills} kills, {self.answered} answered, {len(self.lost)} lost, "
            f"{len(self.doubled)} doubled, {len(self.non_finite)} non-finite"
        )
        return line + (f", {len(self.other)} other faults" if self.other else "")


def audit(store: RolloutStore, answers: Mapping[str, str], checkpoints: Path | None) -> Audit:
    """Compare `store` with `answers` (id to text) that clients hold; updates are of one rollout."""
    found = Audit(answered=len(answers))
    rollouts = _all(store)
    versions = {version.version: version for version in store.versions(limit=10**6)}
    _answers(rollouts, answers, found)
    _states(rollouts, versions, found)
    _lines(rollouts, versions, found)
    _numbers(rollouts, versions, checkpoints, found)
    return found


def _all(store: RolloutStore) -> list[Rollout]:
    rollouts: list[Rollout] = []
    while True:
        after = rollouts[-1].seq if rollouts else 0
        page = store.list(after_seq=after, limit=PAGE, with_tokens=True)
        rollouts += page
        if len(page) < PAGE:
            return rollouts


def _answers(rollouts: list[Rollout], answers: Mapping[str, str], found: Audit) -> None:
    # Once, if at all: ids are a key of the database.
    texts = {rollout.id: rollout.answer for rollout in rollouts}
    for id, text in answers.items():
        if id not in texts:
            found.lost.append(f"answer {id} is not in the store")
        elif texts[id] != clean_text(text):
            found.lost.append(f"answer {id} is stored as {texts[id]!r}, its client has {text!r}")
    numbers = sorted(rollout.seq or 0 for rollout in rollouts)
    if numbers != list(range(1, len(rollouts) + 1)):
        found.lost.append("sequence numbers have gaps: a recorded rollout is gone")


def _states(rollouts: list[Rollout], versions: Mapping[int, WeightVersion], found: Audit) -> None:
    for rollout in rollouts:
        state, id = rollout.state, rollout.id
        if state is S.CLAIMED:
            found.other.append(f"{id} is claimed, and no learner is left")
        if state in WITH_REWARD and rollout.reward is None:
            found.other.append(f"{id} is {state} without a reward")
        if state in WITH_REASON and not rollout.reason:
            found.other.append(f"{id} is {state} without a reason")
        if state is S.TRAINED and rollout.trained_version not in versions:
            found.other.append(f"{id} was trained into version {rollout.trained_version}: none")


def _lines(rollouts: list[Rollout], versions: Mapping[int, WeightVersion], found: Audit) -> None:
    """Each update on the line that is served made one rollout's; no other version did.

    A rollout learned from twice names only the later version, and leaves the earlier without.
    """
    for version in versions.values():
        if version.parent is not None and not version.parent < version.version:
            found.other.append(f"version {version.version} comes from {version.parent}")
    times = [versions[number].created_at for number in sorted(versions)]
    if any(earlier > later for earlier, later in pairwise(times)):
        found.other.append("versions were not made in the order of their numbers")
    trained = Counter(r.trained_version for r in rollouts if r.state is S.TRAINED)
    line = set()
    number = max(versions, default=None)
    while number is not None:
        line.add(number)
        number = versions[number].parent
    for number in line:
        if versions[number].kind == "update" and trained[number] != 1:
            found.doubled.append(
                f"version {number} is served and {trained[number]} rollouts say that it is theirs"
            )
    for number in trained.keys() - line:
        found.lost.append(f"version {number} is on no line, and a rollout is spent on it")


def _numbers(
    rollouts: list[Rollout],
    versions: Mapping[int, WeightVersion],
    checkpoints: Path | None,
    found: Audit,
) -> None:
    for rollout in rollouts:
        if rollout.state is not S.TRAINED:
            continue
        for name in ("behavior_logprobs", "values", "advantages", "importance_ratios"):
            array = getattr(rollout, name)
            if array is not None and not np.isfinite(array).all():
                found.non_finite.append(f"{name} of {rollout.id}")
            if array is not None and len(array) != len(rollout.token_ids):
                found.other.append(f"{name} of {rollout.id} has {len(array)} entries")
    for version in versions.values():
        for name, value in version.metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                found.non_finite.append(f"{name} of version {version.version}")
    for number, path in list_checkpoints(checkpoints) if checkpoints else []:
        for name, tensor in read_policy(path).items():
            if not bool(tensor.isfinite().all()):
                found.non_finite.append(f"{name} in the checkpoint of version {number}")
