"""Several threads and processes at one database, and processes that die.

Each child is forked and opens the store anew; what it sends back comes through a pipe.
"""

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from online_sao.store import RolloutStore
from online_sao.types import RolloutState

FORK = multiprocessing.get_context("fork")
WAIT_S = 60  # far longer than anything here takes, even on a busy machine


def child(work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Run `work(*args)` in another process; the call of the result waits for its answer."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(work(*args)))
    process.start()
    sender.close()

    def answer() -> Any:
        try:
            return receiver.recv()
        finally:
            process.join(30)

    return answer


def record_many(url: str, kit: Any, prefix: str, number: int) -> list[int]:
    with RolloutStore(url) as store:
        return [store.add(kit.rollout(f"{prefix}{i}")).seq for i in range(number)]


def claim_all(url: str, epoch: int) -> list[str]:
    got: list[str] = []
    with RolloutStore(url) as store:
        while True:
            batch = store.claim(
                epoch=epoch,
                limit=3,
                current_version=0,
                max_policy_lag=16,
                max_claims=3,
                run_id="run",
            )
            if not batch:
                return got
            got += [r.id for r in batch]


def test_two_processes_record_at_once(kit, store, store_url):
    answers = [child(record_many, store_url, kit, prefix, 60) for prefix in "ab"]
    seqs = [answer() for answer in answers]
    assert sorted(seqs[0] + seqs[1]) == list(range(1, 121))
    assert seqs[0] == sorted(seqs[0])
    assert len(store.list(limit=200)) == 120


def test_two_processes_record_the_same_answers_once(kit, store, store_url):
    answers = [child(record_many, store_url, kit, "same", 40) for _ in range(2)]
    first, second = (answer() for answer in answers)
    assert first == second
    assert sorted(first) == list(range(1, 41))


def test_two_learners_never_claim_the_same_rollout(kit, store, store_url):
    epoch = kit.begin()
    names = [f"r{i}" for i in range(60)]
    kit.rewarded(*names)
    answers = [child(claim_all, store_url, epoch) for _ in range(2)]
    first, second = (answer() for answer in answers)
    assert sorted(first + second) == sorted(names)
    assert store.counts()[RolloutState.CLAIMED] == 60


def test_many_threads_share_one_store(kit, store):
    epoch = kit.begin()

    def live(number: int) -> str:
        name = f"r{number}"
        store.add(kit.rollout(name))
        store.set_verdict(name, kit.good)
        store.list(limit=5)
        kit.claim(epoch, limit=1)
        return name

    with ThreadPoolExecutor(12) as pool:
        names = list(pool.map(live, range(60)))
    assert sorted(r.seq for r in store.list(limit=100)) == list(range(1, 61))
    assert kit.states() == dict.fromkeys(names, "claimed")


def test_two_processes_create_the_store_at_once(kit, store_url):
    answers = [child(record_many, store_url, kit, prefix, 1) for prefix in "abcd"]
    assert sorted(seq for answer in answers for seq in answer()) == [1, 2, 3, 4]


def test_a_store_travels_to_another_process(store, kit):
    store.add(kit.rollout("x"))
    copy = pickle.loads(pickle.dumps(store))
    assert copy.get("x").id == "x"
    copy.close()


def test_a_store_opened_before_a_fork_works_on_both_sides(kit, store):
    store.add(kit.rollout("before"))
    answer = child(lambda: store.add(kit.rollout("in_child")).seq)
    assert store.add(kit.rollout("in_parent")).seq in (2, 3)
    assert answer() in (2, 3)
    assert len(store.list()) == 3


def test_a_killed_learner_loses_nothing(kit, store, store_url):
    """SIGKILL while it learns; what was recorded before stays, no state is half-made."""
    kit.begin()
    kit.rewarded(*(f"r{i}" for i in range(200)))

    def learn() -> None:
        with RolloutStore(store_url) as mine:
            theirs = type(kit)(mine, kit.open_again)
            epoch = mine.new_epoch()
            mine.recover(epoch)
            while batch := theirs.claim(epoch, limit=2, max_claims=100):
                theirs.train(epoch, mine.next_version(), *(r.id for r in batch))

    for number in (1, 20, 40):
        process = FORK.Process(target=learn)
        process.start()
        deadline = time.monotonic() + WAIT_S
        while store.counts()[RolloutState.TRAINED] < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert process.exitcode in (0, -signal.SIGKILL)
        trained = [r for r in store.list(limit=500) if r.state == RolloutState.TRAINED]
        versions = {v.version for v in store.versions(limit=500)}
        assert len(trained) >= number
        assert {r.trained_version for r in trained} | {0} == versions
    learn()
    assert store.counts()[RolloutState.TRAINED] == 200
    assert store.next_version() == len(store.versions(limit=500))
    got = store.get("r199")
    assert got.values.shape == got.advantages.shape == got.token_ids.shape
