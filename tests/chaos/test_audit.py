"""The audit sees what it is there to see: each fault is planted in a sound store, and named."""

import numpy as np
import pytest
from audit import audit

from online_sao.store import RolloutStore
from online_sao.types import Rollout, Run, StoredVerdict, WeightSpan, WeightVersion

NAMES = ("a", "b", "c", "d")
ANSWERS = dict.fromkeys(NAMES, "Drip.")


@pytest.fixture
def store(tmp_path):
    """Four answers: a and b learned from, c set aside, d waiting."""
    ones = np.ones(2, np.float32)
    with RolloutStore(f"sqlite:///{tmp_path}/store.sqlite") as made:
        made.start_run(Run("run", "sao", 0, "model", "hash"))
        made.add_version(WeightVersion(0, None, "run", "start"))
        epoch = made.new_epoch()
        for name in NAMES:
            made.add(
                Rollout(
                    id=name,
                    response_id=name,
                    choice=0,
                    prompt_token_ids=np.array([1], np.int32),
                    token_ids=np.array([2, 3], np.int32),
                    behavior_logprobs=-ones,
                    weight_spans=(WeightSpan(0, 0, 2),),
                    temperature=1.0,
                    messages=[],
                    answer="Drip.",
                    finish_reason="stop",
                )
            )
            made.set_verdict(name, StoredVerdict(quality=1, style=1, reward=1))
        claims = {"epoch": epoch, "max_policy_lag": 9, "max_claims": 3, "run_id": "run"}
        for version in (1, 2):
            (rollout,) = made.claim(limit=1, current_version=version - 1, **claims)
            made.finish_update(
                epoch=epoch,
                version=WeightVersion(version, version - 1, "run", "update", {"x": 1.0}),
                rollouts=[(rollout.id, ones, ones, ones)],
            )
        made.exclude(["c"], "poison")
        yield made


def plant(store, *statements):
    with store._engine.begin() as conn:
        for statement in statements:
            conn.exec_driver_sql(statement)


def counts(found):
    return len(found.lost), len(found.doubled), len(found.non_finite), len(found.other)


def test_a_sound_store(store):
    found = audit(store, ANSWERS, None)
    assert found.faults == []
    assert found.line(5) == "5 kills, 4 answered, 0 lost, 0 doubled, 0 non-finite"


def test_a_planted_loss(store):
    """The newest answer is gone, as if it had been given to its client before it was recorded."""
    plant(store, "DELETE FROM rollouts WHERE id = 'd'")
    found = audit(store, ANSWERS, None)
    assert found.lost == ["answer d is not in the store"]
    assert found.line(1) == "1 kills, 4 answered, 1 lost, 0 doubled, 0 non-finite"


NAN = "X'0000C07F0000C07F'"


@pytest.mark.parametrize(
    ("statement", "expected", "says"),
    [
        ("DELETE FROM rollouts WHERE id = 'b'", (2, 1, 0, 0), "gaps"),
        ("UPDATE rollout_details SET answer = 'Drop.' WHERE seq = 1", (1, 0, 0, 0), "client has"),
        # learned from again on the same line: the later update takes the rollout over
        ("UPDATE rollouts SET trained_version = 2 WHERE id = 'a'", (0, 2, 0, 0), "version 1"),
        # its update stands, and it waits to be learned from once more
        (
            "UPDATE rollouts SET state = 'rewarded', trained_version = NULL WHERE id = 'b'",
            (0, 1, 0, 0),
            "0 rollouts",
        ),
        # a crash lost version 2, and the rollout was not given back
        (
            "INSERT INTO versions SELECT 3, 1, run_id, 'resume', '{}', created_at, NULL, NULL, "
            "0, 0 FROM versions WHERE version = 2",
            (1, 0, 0, 0),
            "spent",
        ),
        (f"UPDATE rollout_tokens SET advantages = {NAN} WHERE seq = 1", (0, 0, 1, 0), "advantages"),
        (
            f"UPDATE rollout_tokens SET behavior_logprobs = {NAN} WHERE seq = 2",
            (0, 0, 1, 0),
            "logprobs",
        ),
        ("UPDATE versions SET metrics = '{\"x\": NaN}' WHERE version = 2", (0, 0, 1, 0), "x of"),
        ("UPDATE rollouts SET state = 'claimed' WHERE id = 'd'", (0, 0, 0, 1), "no learner"),
        ("UPDATE rollouts SET reward = NULL WHERE id = 'd'", (0, 0, 0, 1), "without a reward"),
        ("UPDATE rollouts SET reason = NULL WHERE id = 'c'", (0, 0, 0, 1), "without a reason"),
        ("UPDATE versions SET parent = 2 WHERE version = 1", (0, 0, 0, 1), "comes from"),
    ],
)
def test_other_planted_faults(store, statement, expected, says):
    plant(store, statement)
    if "parent = 2" in statement:
        plant(store, "UPDATE versions SET parent = NULL WHERE version = 2")
    found = audit(store, ANSWERS, None)
    if "parent = 2" in statement:  # version 2 is now alone on its line
        assert found.other
        assert says in found.other[0]
        return
    assert counts(found) == expected, found.faults
    assert says in " ".join(found.faults)
