"""The loop around the learner: claim, drop stale, update, record, publish, checkpoint.

Components do not know one another: the loop is given a store and a publisher. It runs in one
thread; `pause`, `resume`, `status` and `request_rollback` may be called from any other and
never wait for an update (a rollback is carried out between two updates).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from online_sao.config import Config
from online_sao.errors import (
    CheckpointError,
    FencedError,
    LearnerError,
    NotFoundError,
    StoreError,
)
from online_sao.learner.checkpoint import (
    Release,
    checkpoint_bytes,
    list_checkpoints,
    load_checkpoint,
    make_room,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)
from online_sao.learner.guards import Firing, GuardRails, ProbeResult, make_samples
from online_sao.learner.learner import Learner, Metrics
from online_sao.store import RolloutStore
from online_sao.store.store import TrainedArrays
from online_sao.types import Rollout, RolloutState, Run, Skipped, WeightVersion

log = logging.getLogger(__name__)

POLL_S = 1.0  # how often an idle loop looks into the store unasked
STORE_RETRY_S = 2.0  # pause after the store refused
PUBLISH_RETRY_S = 5.0  # after a failed publish, learning goes on for so long before the next
OTHER_RUN = (
    "A new run begins from the start weights: settings of the learner, seed or model differ from "
    "the last start's. What was learned then is not served; with the settings of then it goes on, "
    "as long as its checkpoints are there (pin one to keep it), and with --keep-weights the new "
    "settings go on from it."
)
MAX_FAILURES_IN_A_ROW = 5  # then the loop pauses itself instead of eating the queue
EVENTS_READ = 1000  # of a kind, when a learner looks for what one before it has seen
RATE_WINDOW_S = 120.0  # over which trained rollouts per minute are taken


class WeightPublisher(Protocol):
    """Brings a version's weights to the engines. The service implements it."""

    def publish(self, version: int, weights: dict[str, Tensor]) -> None:
        """Make `weights` the ones to serve; returns when the engines have them.

        Raises WeightUpdateError when they could not be brought or no engine took them in time;
        after that, or any other error, a later version is tried.
        """


@dataclass
class LoopStatus:
    version: int
    published_version: int
    num_updates: int
    paused: bool
    pause_reason: str | None
    busy: bool
    failure: str | None
    epoch: int
    run_id: str
    rollouts_per_minute: float
    metrics: Metrics
    pretraining: dict[str, Any]
    guards: dict[str, Any]


def make_run(config: Config, model_hash: str) -> Run:
    """The run that these settings belong to: same settings, seed and start weights, same id."""
    learner = config.learner.model_dump(mode="json")
    # Where and how fast, not what is learned:
    for name in (
        "threads",
        "resources",
        "gpu_share",
        "checkpoint_every",
        "checkpoint_keep",
        "publish_min_interval_s",
        "checkpoint_min_free_gib",
        "session_reward_wait_s",
    ):
        learner.pop(name)
    text = json.dumps([learner, config.engine.dtype, model_hash], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Run(
        id=f"{config.learner.preset}-seed{config.learner.seed}-{digest}",
        preset=config.learner.preset,
        seed=config.learner.seed,
        model=config.model.name,
        model_hash=model_hash,
        config=config.model_dump(mode="json"),
    )


class LearnerLoop:
    def __init__(
        self,
        config: Config,
        run: Run,
        learner: Learner,
        store: RolloutStore,
        publisher: WeightPublisher,
    ) -> None:
        self._config = config
        self._run = run
        self._learner = learner
        self._store = store
        self._publisher = publisher
        self._checkpoints = config.run_dir / "checkpoints"
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._pause_reason: str | None = None
        self._requests: list[tuple[Callable[[], int], Future[int]]] = []
        self._ended = False
        self._lock = threading.Lock()
        self._event_lock = threading.Lock()
        self._epoch = 0
        self._version = 0
        self._published = 0
        self._unpublished = False
        self._next_publish = -math.inf  # not before this time
        self._publish_failure: str | None = None  # of the last publish
        self._skipped = Skipped(0, 0)
        self._lost: deque[list[str]] = deque()  # rollouts of updates that a crash took, in order
        self._holds = False  # the store may have rollouts as claimed by us
        self._unrecorded = False  # the weights have moved and the store does not know
        self._checkpointed: int | None = None  # the newest version that is on disk whole
        self._busy = False
        self._failure: str | None = None
        self._failures = 0
        self._metrics: Metrics = {}
        self._trained_at: list[float] = []
        self._pretraining: dict[str, Any] = {"state": "none", "done": 0, "total": 0}
        self._guards = GuardRails(config.guards)
        self._guards_status = self._guards.status()
        self._probes: list[ProbeResult] = []  # rounds that the guards have not seen yet
        self._last_firing: dict[str, Any] | None = None
        self._kept: int | None = None  # checkpoint that a guard keeps until learning resumes
        self._unsaved: deque[tuple[str, dict[str, Any], int]] = deque()  # events, oldest first

    # --- start

    def start(self) -> str:
        """Take over from any earlier learner and resume; returns "start" or "resume".

        Damaged checkpoints are passed over, and said so in an event. Raises StoreError, and
        CheckpointError where the store does not know what was learned, or it is to be kept and
        cannot be.
        """
        parent: int | None = None
        self._refuse_unknown_checkpoints()
        self._epoch = self._store.new_epoch()
        self._store.recover(self._epoch)
        known = self._store.versions(limit=1, run_id=self._run.id)
        newest = self._store.latest_version()
        if not known and newest is not None and self._config.service.keep_weights:
            parent = self._take_over(newest)  # first: if it fails, nothing has begun
        self._store.start_run(self._run)
        # Deleted by hand; the learner says so first, and deletes then.
        held = {version for version, _ in list_checkpoints(self._checkpoints)}
        for retained in self._store.retained_versions():
            if retained.version not in held:
                self._store.set_checkpoint(retained.version, None)
        kind = "start" if parent is None else "resume"
        if known:
            kind = "resume"
            parent = self._resume(self._run.id)
            self._lost.extend(self._store.rewind(-1 if parent is None else parent, self._run.id))
            num_lost = sum(map(len, self._lost))
            self._event("resume", {"from_version": parent, "rollouts_returned": num_lost})
            self._pause_reason = self._pause_in_force()
            self._remember_guards()
        elif parent is not None:
            self._event("resume", {"from_version": parent})
        elif newest is not None:
            self._event("error", {"what": OTHER_RUN})
        if not known and self._pause_in_force():
            # It was of a run with other settings, and must not come back over this one.
            self._event("resume_learning", {"reason": "a run with other settings begins"})
        self._version = self._store.next_version()
        if kind == "resume":
            began_from = self._first_version() if parent is None else parent
            self._skipped = Skipped(self._version, self._version - began_from)
        self._store.add_version(
            WeightVersion(self._version, parent=parent, run_id=self._run.id, kind=kind)
        )
        if parent is not None:
            self._checkpointed = self._version  # its parent's: the weights are the same
        # Engines start with the start weights; but one that outlived the learner before us has
        # later ones, so after a crash even the start weights are brought to it.
        self._unpublished = kind == "resume"
        if not self._unpublished:
            self._published = self._version
        return kind

    @property
    def version(self) -> int:
        return self._version

    @property
    def serves_start_weights(self) -> bool:
        """Whether the current version is the start weights, which engines already have."""
        return self._learner.num_updates == 0 and not self._unpublished

    def publish_if_due(self) -> None:
        """Publish what the engines do not have yet; for the loop's own thread, before `run`."""
        if self._unpublished:
            self._publish()

    def _refuse_unknown_checkpoints(self) -> None:
        """A store that was lost or exchanged must not make learning begin anew in silence."""
        known = self._store.next_version() - 1
        for version, path in list_checkpoints(self._checkpoints):
            if version > known:
                raise CheckpointError(
                    f"{path} is a checkpoint that the store {self._store.place} knows nothing of. "
                    f"Bring back the store it belongs to, or move {self._checkpoints} away to "
                    "begin anew."
                )

    def _take_over(self, newest: WeightVersion) -> int | None:
        """Load what another run learned last (`service.keep_weights`); its version, or None
        where it learned nothing. Raises CheckpointError."""
        run = next(run for run in self._store.runs() if run.id == newest.run_id)
        if run.model_hash != self._run.model_hash:
            raise CheckpointError(
                f"The weights of the run {run.id} cannot be kept: it learned on another model. "
                "Start without --keep-weights."
            )
        version = self._resume(run.id)
        if version is None and any(
            self._store.get_version(number).kind == "update" for number in self._line(run.id)
        ):
            raise CheckpointError(
                f"The run {run.id} has no checkpoint that these settings can go on from: start "
                "without --keep-weights, or with the preset of then."
            )
        return version

    def _resume(self, run_id: str) -> int | None:
        """Load the newest whole checkpoint of the line of weights that a run was on; its
        version, or None for the start weights."""
        line = self._line(run_id)
        ancestor = next(line, None)
        for version, path in list_checkpoints(self._checkpoints):
            while ancestor is not None and ancestor > version:
                ancestor = next(line, None)
            if ancestor != version:
                continue  # of another run, or left by a rollback
            try:
                return load_checkpoint(path, self._learner)
            except CheckpointError as error:
                log.warning("checkpoint passed over: %s", error)
                self._event("error", {"what": f"Checkpoint of version {version}: {error}"})
        return None

    def _first_version(self) -> int:
        """Where this run began."""
        first = 0
        for first in self._line(self._run.id):  # noqa: B007
            pass
        return first

    def _line(self, run_id: str) -> Iterator[int]:
        """Versions from a run's newest back along its parents."""
        newest = self._store.versions(limit=1, run_id=run_id)
        version = newest[0].version if newest else None
        while version is not None:
            yield version
            version = self._store.get_version(version).parent

    def _pause_in_force(self) -> str | None:
        """The reason of a pause that outlives the learner that was paused."""
        paused = self._store.events("pause", limit=1)
        resumed = self._store.events("resume_learning", limit=1)
        if not paused or (resumed and resumed[0].id > paused[0].id):
            return None
        return str(paused[0].data["reason"])

    def _remember_guards(self) -> None:
        """What the guards of the learner before us held: first probes, last firing, its pin."""
        for event in self._store.events("probe", after_id=0, limit=EVENTS_READ):
            data = event.data
            is_ours = data["run_id"] == self._run.id and data["quality"] is not None
            if is_ours and self._guards.is_enough(data["num_answers"]):
                fields = ("version", "num_answers", "quality", "reward", "forgeries_rewarded")
                self._guards.reference = ProbeResult(*(event.data[name] for name in fields))
                self._guards_status = self._guards.status()
                break
        fired = self._store.events("guard", limit=1)
        if fired:
            self._last_firing = fired[0].data
            resumed = self._store.events("resume_learning", limit=1)
            if not resumed or resumed[0].id < fired[0].id:
                self._kept = fired[0].data["kept_version"]

    def needs_pretraining(self) -> bool:
        return (
            self._config.learner.value_pretraining_rollouts > 0 and self._learner.num_updates == 0
        )

    def pretrain(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Fit the critic and fill the baselines; see Learner.pretrain."""
        self._pretraining = {"state": "fitting", "done": 0, "total": len(rollouts)}

        def on_step(done: int, total: int) -> None:
            self._pretraining |= {"done": done, "total": total}
            if self._stop.is_set():
                raise LearnerError("stopped before value pretraining was done")

        metrics = self._learner.pretrain(rollouts, on_step)
        self._pretraining = {
            "state": "done",
            "done": self._pretraining["done"],
            "total": self._pretraining["total"],
            **{key.removeprefix("pretraining/"): value for key, value in metrics.items()},
        }
        return metrics

    def note_pretraining(self, state: str, done: int = 0, total: int = 0) -> None:
        """Say in the status what happens before `pretrain` (for example "generating")."""
        self._pretraining = {"state": state, "done": done, "total": total}

    # --- control, from any thread

    def wake(self) -> None:
        """There may be something to learn from."""
        self._wake.set()

    def pause(self, reason: str) -> None:
        self._pause_reason = reason
        self._event("pause", {"reason": reason})

    def resume(self) -> None:
        self._pause_reason = None
        self._failures = 0
        self._kept = None
        self._event("resume_learning", {})
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def add_probe(self, result: ProbeResult) -> None:
        """A round of held-out answers has been judged."""
        with self._lock:
            self._probes.append(result)
        self._wake.set()

    def request_rollback(self, version: int) -> Future[int]:
        """Go back to a retained checkpoint; the future gives the new version's number.

        It fails with NotFoundError when the checkpoint is not retained, and with LearnerError
        when the loop has ended.
        """
        return self._request(lambda: self._rollback(version))

    def request_checkpoint(self) -> Future[int]:
        """Write a checkpoint of the current version; the future gives its number.

        It fails with CheckpointError when it cannot be written, and with LearnerError when the
        loop has ended.
        """
        return self._request(self._save_checkpoint)

    def _request(self, work: Callable[[], int]) -> Future[int]:
        """Have `work` done by the loop's thread, between two updates."""
        future: Future[int] = Future()
        with self._lock:
            self._requests.append((work, future))
        if self._ended:
            self._refuse_requests()
        self._wake.set()
        return future

    def status(self) -> LoopStatus:
        now = time.monotonic()
        recent = [t for t in self._trained_at if now - t <= RATE_WINDOW_S]
        span = max(now - recent[0], 1e-9) if len(recent) > 1 else 0.0
        return LoopStatus(
            version=self._version,
            published_version=self._published,
            num_updates=self._learner.num_updates,
            paused=self._pause_reason is not None,
            pause_reason=self._pause_reason,
            busy=self._busy,
            failure=self._failure,
            epoch=self._epoch,
            run_id=self._run.id,
            rollouts_per_minute=60 * (len(recent) - 1) / span if span else 0.0,
            metrics=dict(self._metrics),
            pretraining=dict(self._pretraining),
            guards=self._guards_status | {"last_firing": self._last_firing},
        )

    # --- the loop

    def run(self) -> None:
        """Learn until `stop`; then write a checkpoint. Raises FencedError when taken over."""
        store_failure: str | None = None
        try:
            while not self._stop.is_set():
                try:
                    worked = self._one_round()
                    if store_failure is not None and self._failure == store_failure:
                        self._failure = None  # the store answers again
                    store_failure = None
                    if not worked:
                        self._wake.wait(POLL_S)
                        self._wake.clear()
                except FencedError:
                    raise
                except StoreError as error:
                    # Nothing is lost: what was claimed returns when the store does.
                    self._failure = store_failure = str(error)
                    log.warning("the store refused: %s", error)
                    self._stop.wait(STORE_RETRY_S)
            with contextlib.suppress(StoreError):
                self._save_events()
            is_kept = self._checkpointed == self._version
            if self._learner.num_updates > 0 and not self._unrecorded and not is_kept:
                self._checkpoint()
        finally:
            self._ended = True
            self._refuse_requests()

    def _one_round(self) -> bool:
        """At most one update. False when there was nothing to do."""
        self._save_events()
        if self._holds:  # the store failed in between, or some were set aside
            self._store.release(self._epoch)
            self._holds = False
        self._carry_out_requests()
        self._take_probes()
        if self._unpublished and self._may_publish():
            self._publish()
        if self._pause_reason is not None:
            return False
        self._holds = True  # before it answers: it may claim, and the answer be lost
        trajectories, is_full = self._claim()
        if not trajectories:
            self._holds = False
            return False
        if not is_full:
            self._store.release(self._epoch)  # wait until the update is full
            self._holds = False
            return False
        self._busy = True
        try:
            self._learn(trajectories)
        finally:
            self._busy = False
        return True

    def _claim(self) -> tuple[list[list[Rollout]], bool]:
        """Trajectories for one update, and whether they are as many as it takes: whole sessions,
        or single turns whose prompts hold the turns before as text that is seen and not learned
        from."""
        config = self._config.learner
        wanted: dict[str, Any] = {
            "epoch": self._epoch,
            "limit": config.rollouts_per_update,
            "order": config.order,
            "current_version": self._version,
            "max_policy_lag": config.max_policy_lag,
            "skipped": self._skipped,
            "max_claims": config.max_claims,
            "run_id": self._run.id,
        }
        while self._lost:  # first, as they were learned: then nothing is lost but time
            found = self._store.claim(**(wanted | {"order": "oldest"}), ids=self._lost[0])
            self._lost.popleft()
            if found:
                whole = config.credit == "session"
                return (_trajectories(found) if whole else [[r] for r in found]), True
        if config.credit == "session":
            trajectories = self._store.claim_trajectories(
                **wanted, reward_wait_s=config.session_reward_wait_s
            )
        else:
            trajectories = [[rollout] for rollout in self._store.claim(**wanted)]
        return trajectories, len(trajectories) >= config.rollouts_per_update

    def _num_waiting(self) -> int:
        """Trajectories that could be claimed now."""
        config = self._config.learner
        if config.credit == "session":
            return self._store.num_ready_trajectories(self._run.id, config.session_reward_wait_s)
        return self._store.num_rewarded(self._run.id)

    def _learn(self, trajectories: Sequence[Sequence[Rollout]]) -> None:
        rollouts = [rollout for trajectory in trajectories for rollout in trajectory]
        ids = [rollout.id for rollout in rollouts]
        broken = [r.id for r in rollouts if not np.isfinite(r.behavior_logprobs).all()]
        if broken:  # the others have done nothing wrong: the next round takes them again
            self._set_aside(broken, "non_finite", "behavior log-probs are not finite")
            return
        lag = max(self._skipped.lag(r.weight_version_start, self._version) for r in rollouts)
        try:
            result = self._learner.update(trajectories, policy_lag=lag)
        except LearnerError as error:
            self._set_aside(ids, "unusable", str(error))
            return
        except Exception as error:  # a fault of ours: keep serving, lose nothing else
            log.exception("update failed")
            self._set_aside(ids, "update_failed", f"{type(error).__name__}: {error}")
            return
        if not result.applied:
            self._set_aside(ids, "non_finite", f"not finite: {', '.join(result.metrics)}")
            return
        self._failures = 0
        version = self._version + 1
        self._record(
            WeightVersion(
                version,
                parent=self._version,
                run_id=self._run.id,
                kind="update",
                metrics=dict(result.metrics),
            ),
            [
                (
                    id,
                    result.values.get(id),
                    result.advantages.get(id),
                    result.importance_ratios.get(id),
                )
                for id in ids
            ],
        )
        self._holds = False
        self._version = version
        self._metrics = result.metrics
        for rollout in rollouts:
            log.info(
                "trained",
                extra={
                    "rollout_id": rollout.id,
                    "weight_version": version,
                    "reward": rollout.reward,
                    "seconds": result.metrics.get("seconds/total"),
                },
            )
        now = time.monotonic()
        self._trained_at = [t for t in self._trained_at if now - t <= RATE_WINDOW_S]
        self._trained_at += [now] * len(ids)
        self._failure = None
        self._unpublished = True
        # Before the publish: what a guard takes back need not be served first.
        firing = self._guards.observe(make_samples(version, rollouts, result.metrics))
        self._guards_status = self._guards.status()
        if firing is not None and self._act(firing):
            return  # rolled back, which has published
        if self._may_publish():
            self._publish()
        every = self._config.learner.checkpoint_every
        if every and self._learner.num_updates % every == 0:
            self._checkpoint()

    def _record(self, version: WeightVersion, trained: list[TrainedArrays]) -> None:
        """Tell the store of an update that has been made."""

        def write() -> None:
            nonlocal trained
            try:
                self._store.finish_update(epoch=self._epoch, version=version, rollouts=trained)
            except FencedError:
                raise
            except StoreError:
                if self._is_known(version.version):
                    return  # written, though the answer was lost
                # One that was taken from us meanwhile must not keep out the others.
                now = self._store.get_many([id for id, *_ in trained])
                ours = {r.id for r in now if r.state is RolloutState.CLAIMED}
                trained = [row for row in trained if row[0] in ours]
                raise

        self._insist(write)

    def _insist(self, write: Callable[[], None]) -> None:
        """Repeat `write` while the store refuses: the weights have moved, and to go on without
        a record of it would be to train on the same rollouts twice.

        Raises StoreError if stopped meanwhile, and then no checkpoint is written either.
        """
        self._unrecorded = True
        failure: str | None = None
        while True:
            try:
                write()
                break
            except FencedError:
                raise
            except StoreError as error:
                self._failure = failure = str(error)
                log.warning("the store refused: %s", error)
                if self._stop.wait(STORE_RETRY_S):
                    raise
        self._unrecorded = False
        self._is_over(failure)

    def _is_over(self, failure: str | None) -> None:
        """Take back a failure that was shown, unless another has come since."""
        if failure is not None and self._failure == failure:
            self._failure = None

    def _is_known(self, version: int) -> bool:
        try:
            self._store.get_version(version)
        except NotFoundError:
            return False
        return True

    def _set_aside(self, ids: list[str], reason: str, detail: str) -> None:
        self._store.exclude(ids, reason)
        self._event("error", {"what": f"Update refused ({reason}): {detail}", "rollouts": ids})
        self._failure = detail
        self._failures += 1
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            self.pause(f"{self._failures} updates in a row failed; the last: {detail}")

    # --- guard rails

    def _take_probes(self) -> None:
        with self._lock:
            results, self._probes = self._probes, []
        for result in results:
            self._event("probe", {**asdict(result), "run_id": self._run.id})
            firing = self._guards.observe_probe(result)
            self._guards_status = self._guards.status()
            if firing is not None:
                self._act(firing)

    def _act(self, firing: Firing) -> bool:
        """Do what the settings say about a firing, and record it. True if it rolled back."""
        action = self._config.guards.action
        about = {"weight_version": self._version, "guard": firing.guard.name}
        log.warning("%s", firing.describe(), extra=about)
        fired_at = self._version
        target, tried = None, None
        if action != "warn":
            try:
                target = self._way_back(firing)
                last = self._store.events("guard", limit=1)
                tried = last[0].data["rolled_back_to"] if last else None
            except StoreError as error:  # what must not happen is that learning goes on
                log.warning("no way back was looked for: %s", error)
        rolled_back = False
        if action == "rollback":
            # Going back twice to the same weights would only bring the same again.
            if target is not None and target != tried and firing.guard.rollback_helps:
                rolled_back = self._rolled_back(target)
            action = "rollback" if rolled_back else "pause"
        if action == "pause" and target is not None and self._pause_reason is None:
            self._kept = target
        self._last_firing = {
            "guard": firing.guard.name,
            "value": firing.value,
            "bound": firing.bound,
            "action": action,
            "what": firing.describe(),
            "weight_version": fired_at,
            "rolled_back_to": target if rolled_back else None,
            "kept_version": self._kept,
        }
        self._event("guard", self._last_firing)
        if action == "pause" and self._pause_reason is None:
            back = (
                f"or roll back to version {target}"
                if target is not None
                else "there is no checkpoint from before it to roll back to"
            )
            self.pause(f"{firing.describe()} Resume when that is mended; {back}.")
        return rolled_back

    def _rolled_back(self, version: int) -> bool:
        try:
            self._rollback(version)
        except (CheckpointError, NotFoundError) as error:
            log.warning("no rollback to version %s: %s", version, error)
            self._event("error", {"what": str(error)})
            return False
        return True

    def _way_back(self, firing: Firing) -> int | None:
        """The newest checkpoint of this line from before the trouble; never one from before the
        preference in force, which somebody chose."""
        preference = self._store.preference()
        chosen_at = preference.weight_version if preference else None
        line = set(self._line(self._run.id))
        for version, _ in list_checkpoints(self._checkpoints):
            if version <= firing.good_version and version in line:
                return version if chosen_at is None or version >= chosen_at else None
        return None

    def _may_publish(self) -> bool:
        if time.monotonic() < self._next_publish:
            return False
        config, held_back = self._config.learner, self._version - self._published
        if held_back >= config.publish_every or self._pause_reason is not None:
            return True
        return self._num_waiting() < config.rollouts_per_update

    def _publish(self) -> None:
        dtype = getattr(torch, self._config.engine.dtype)
        try:
            self._publisher.publish(self._version, self._learner.policy.weights(dtype))
        except Exception as error:
            # Learning goes on; the next publish carries this update too.
            log.warning("version %s was not published: %s", self._version, error)
            self._failure = self._publish_failure = str(error)
            self._event("error", {"what": str(error)})
            self._next_publish = time.monotonic() + PUBLISH_RETRY_S
            return
        self._is_over(self._publish_failure)
        self._publish_failure = None
        self._next_publish = time.monotonic() + self._config.learner.publish_min_interval_s
        self._published = self._version
        self._unpublished = False
        log.info("published", extra={"weight_version": self._version})
        try:
            self._store.set_published(self._version)
        except StoreError as error:  # a time stamp: nothing depends on it
            log.warning("the publish of version %s was not noted: %s", self._version, error)

    def _checkpoint(self) -> None:
        try:
            self._save_checkpoint()
        except (CheckpointError, StoreError) as error:
            self._failure = str(error)
            log.warning("%s", error)
            self._event("error", {"what": str(error)})

    def _save_checkpoint(self) -> int:
        """Write the current version's; old ones make room for it, down to the newest and the
        pinned. Raises CheckpointError and StoreError."""
        config = self._config.learner
        reserve = round(config.checkpoint_min_free_gib * 2**30)
        self._make_room(checkpoint_bytes(self._learner) + reserve)
        path = save_checkpoint(self._checkpoints, self._learner, self._version, self._run.id)
        self._store.set_checkpoint(self._version, str(path))
        self._checkpointed = self._version
        kept = self._kept_checkpoints()
        prune_checkpoints(self._checkpoints, config.checkpoint_keep, *kept)
        self._make_room(reserve)
        return self._version

    def _make_room(self, needed_bytes: int) -> None:
        make_room(self._checkpoints, needed_bytes, *self._kept_checkpoints())

    def _kept_checkpoints(self) -> tuple[set[int], set[int], Release]:
        """The version whose checkpoint a guard keeps; those on lines left; and how the store is
        asked about the others, some of which an operator has pinned."""
        kept = set() if self._kept is None else {self._kept}
        left = {v.version for v in self._store.retained_versions() if v.abandoned}
        return kept, left, self._store.release_checkpoint

    def _carry_out_requests(self) -> None:
        with self._lock:
            wanted, self._requests = self._requests, []
        for work, future in wanted:
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has given up, and was told that nothing was done
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _refuse_requests(self) -> None:
        with self._lock:
            wanted, self._requests = self._requests, []
        for _, future in wanted:
            if future.set_running_or_notify_cancel():
                future.set_exception(LearnerError("The learner has ended; start it again."))

    def _rollback(self, version: int) -> int:
        path = self._checkpoints / f"v{version}"
        retained = [number for number, _ in list_checkpoints(self._checkpoints)]
        if version not in retained:
            raise NotFoundError(
                f"Version {version} has no retained checkpoint; retained: "
                f"{', '.join(map(str, retained)) or 'none'}."
            )
        is_ours = read_state(path)["run_id"] == self._run.id
        if not (is_ours or version in self._line(self._run.id)):  # see _take_over
            raise NotFoundError(f"Version {version} belongs to another run.")
        load_checkpoint(path, self._learner)

        def write() -> None:
            self._version = self._store.roll_back(version, self._run.id, self._epoch)

        self._insist(write)
        self._skipped = Skipped(self._version, self._version - version)
        self._lost.clear()
        self._checkpointed = self._version  # the weights are those of `version`
        self._guards.reset()
        self._guards_status = self._guards.status()
        self._event("rollback", {"to": version, "made": self._version})
        self._unpublished = True
        self._publish()
        return self._version

    def _event(self, kind: str, data: dict[str, Any]) -> None:
        """Record an event; if the store refuses, later and in order (a pause must outlive us)."""
        with self._event_lock:
            self._unsaved.append((kind, data, self._version))
        try:
            self._save_events()
        except StoreError as error:
            log.warning("event %s not recorded yet: %s", kind, error)

    def _save_events(self) -> None:
        with self._event_lock:
            while self._unsaved:
                self._store.add_event(*self._unsaved[0])
                self._unsaved.popleft()


def _trajectories(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Turns, in order, by the trajectory they belong to."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.trajectory_id or rollout.id, []).append(rollout)
    return list(found.values())
