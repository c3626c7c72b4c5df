"""Faults that users of comparable systems met, each by its number: those of the engine alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learning import make_learner, on_policy, verdict
from test_engine import GAP, Harness

from online_sao.config import LearnerConfig
from online_sao.engine.weight_file import write_weight_file
from online_sao.learner.batch import make_batch
from online_sao.learner.policy import Policy
from online_sao.types import RolloutState

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UPDATES = 200
VERSIONS = 20
LOW_TEMPERATURE = 0.6


@pytest.fixture(scope="module")
def harness(tiny_model, tmp_path_factory):
    made = Harness(tiny_model, tmp_path_factory.mktemp("weights"))
    yield made
    made.engine.shutdown()
    made.loop.close()


def test_c01_the_ratio_is_one_while_the_weights_are_unchanged(base_model, tmp_path_factory):
    engine = Harness(base_model, tmp_path_factory.mktemp("weights"))
    try:
        (rollout,) = engine.ask(temperature=LOW_TEMPERATURE, max_tokens=40)
    finally:
        engine.engine.shutdown()
        engine.loop.close()
    config = LearnerConfig(compute_dtype="float32", kl_coef=0.0)
    policy = Policy(str(base_model), config, torch.device("cpu"))
    batch = make_batch([[_rewarded(rollout)]])
    now = policy.logprobs(batch)[batch.action_mask].numpy()
    ratios = np.exp(now - rollout.behavior_logprobs)
    print(f"mean ratio {ratios.mean():.5f}, first {ratios[0]:.5f}, of {len(ratios)} tokens")
    assert rollout.temperature == LOW_TEMPERATURE
    # Float32 on both sides: what is left is the order of summation.
    assert ratios.mean() == pytest.approx(1, abs=1e-3)
    assert ratios[0] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"top_p": 0.9}, "sampling:top_p"),
        ({"top_k": 20}, "sampling:top_k"),
        ({"min_p": 0.1}, "sampling:min_p"),
        ({"repetition_penalty": 1.2}, "sampling:repetition_penalty"),
        ({"logit_bias": {5: 1.0}}, "sampling:logit_bias"),
        ({"min_tokens": 4}, "sampling:min_tokens"),
        ({"bad_words": ["rain"]}, "sampling:_bad_words_token_ids"),
    ],
)
def test_c02_other_settings_are_served_and_excluded(harness, sampling, reason):
    (rollout,) = harness.ask(**sampling)
    assert rollout.answer is not None
    assert len(rollout.token_ids) > 0
    assert (rollout.state, rollout.reason.split(":")[0]) == (RolloutState.EXCLUDED, "sampling")
    assert rollout.reason in (reason, reason.replace("_bad_words_token_ids", "bad_words"))


def test_c03_at_learning_rate_zero_nothing_drifts(harness, tiny_model):
    """Two hundred updates are made, published and loaded; the answers stay what they were."""
    learner = make_learner(tiny_model, policy_lr=0.0, critic_lr=0.0)
    (before,) = harness.ask(seed=3)
    first_gap = harness.gap(before)
    rollout = _rewarded(before)
    start = harness.engine.weight_version
    for version in range(start + 1, start + UPDATES + 1):
        result = learner.update([[rollout]])
        assert result.applied
        weights = learner.policy.weights(torch.float32)
        harness.load(write_weight_file(harness.folder, version, weights))
    (after,) = harness.ask(seed=3)
    assert after.weight_version_start == start + UPDATES
    assert after.token_ids.tolist() == before.token_ids.tolist()
    gap = np.abs(
        on_policy(learner, _rewarded(after)).behavior_logprobs - after.behavior_logprobs
    ).max()
    assert gap <= first_gap + 1e-6
    assert gap < GAP


def test_c12_twenty_versions_on_one_shared_prefix(harness):
    """No token is computed on a prefix cached under older weights: its log-probs would be off."""
    start = harness.engine.weight_version
    for version in range(start + 1, start + VERSIONS + 1):
        harness.ask(text="warm the cache")  # the system prompt is cached under the old weights
        harness.load(harness.new_weights(version))
        (rollout,) = harness.ask(text="the same long prefix")
        assert {span.version for span in rollout.weight_spans} == {version}
        assert harness.gap(rollout) < GAP


def _rewarded(rollout):
    return replace(rollout, verdict=verdict(1.0), state=RolloutState.REWARDED)
