"""Rollouts to padded tensors: what stands where is written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learning import make_rollout, next_turn

from online_sao.errors import LearnerError
from online_sao.learner.batch import make_batch, prompt_key

SHORT = make_rollout("s", prompt=[5, 6], tokens=[7, 8], logprobs=[-0.5, -1.5], reward=0.25)


def turns():
    """Two turns: prompt 5 6, action 7 8, observation 9 10 11, action 12."""
    first = replace(SHORT, id="t0", temperature=0.5)
    second = next_turn(first, "t1", [9, 10, 11], [12], logprobs=[-2.5], reward=1.0, temperature=2.0)
    return [first, second]


def test_one_rollout():
    batch = make_batch([[SHORT]])
    assert batch.token_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.attention_mask.tolist() == [[True] * 4]
    assert batch.action_mask.tolist() == [[False, False, True, True]]
    assert batch.action_index.tolist() == [[-1, -1, 0, 0]]
    assert batch.behavior_logprobs.tolist() == [[0, 0, -0.5, -1.5]]
    assert batch.rewards.tolist() == [[0, 0, 0, 0.25]]  # on the last token
    assert batch.num_actions == 2
    assert not batch.is_padded
    # the output at column t - 1 speaks about the token in column t
    assert [x.tolist() for x in batch.state_index] == [[0, 0], [1, 2]]


def test_a_session_of_two_turns_has_an_observation_between_its_actions():
    batch = make_batch([turns()])
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]
    assert batch.action_index.tolist() == [[-1, -1, 0, 0, -1, -1, -1, 1]]
    assert batch.action_mask.tolist() == [[False] * 2 + [True] * 2 + [False] * 3 + [True]]
    assert batch.behavior_logprobs.tolist() == [[0, 0, -0.5, -1.5, 0, 0, 0, -2.5]]
    # each reward on the last token of the action that earned it
    assert batch.rewards.tolist() == [[0, 0, 0, 0.25, 0, 0, 0, 1.0]]
    assert batch.temperature.tolist() == [[1, 1, 0.5, 0.5, 1, 1, 1, 2.0]]
    assert [x.tolist() for x in batch.state_index] == [[0, 0, 0], [1, 2, 6]]
    assert batch.returns().tolist() == [1.25]
    assert batch.first_action_index().tolist() == [2]


def test_a_turn_that_adds_nothing_to_the_history_follows_at_once():
    first = SHORT
    batch = make_batch([[first, next_turn(first, "n", [], [9])]])
    assert batch.action_index.tolist() == [[-1, -1, 0, 0, 1]]


def test_padding_is_on_the_right_and_counts_for_nothing():
    batch = make_batch([[SHORT], turns()])
    assert batch.token_ids.tolist() == [
        [5, 6, 7, 8, 0, 0, 0, 0],
        [5, 6, 7, 8, 9, 10, 11, 12],
    ]
    assert batch.attention_mask.tolist() == [[True] * 4 + [False] * 4, [True] * 8]
    assert batch.action_mask.tolist()[0] == [False, False, True, True] + [False] * 4
    assert batch.behavior_logprobs.tolist()[0] == [0, 0, -0.5, -1.5, 0, 0, 0, 0]
    assert batch.rewards.tolist()[0] == [0, 0, 0, 0.25, 0, 0, 0, 0]
    assert batch.is_padded
    assert batch.num_actions == 5
    assert [x.tolist() for x in batch.state_index] == [[0, 0, 1, 1, 1], [1, 2, 1, 2, 6]]
    assert batch.returns().tolist() == [0.25, 1.25]
    assert batch.first_action_index().tolist() == [2, 2]


def test_types():
    batch = make_batch([turns()])
    assert batch.token_ids.dtype == batch.action_index.dtype == torch.int64
    assert batch.action_mask.dtype == batch.attention_mask.dtype == torch.bool
    for name in ("behavior_logprobs", "rewards", "temperature"):
        assert getattr(batch, name).dtype == torch.float32, name


def test_scatter_puts_values_at_the_actions_and_is_differentiable():
    batch = make_batch([[SHORT], turns()])
    at_actions = torch.tensor([1.0, 2, 3, 4, 5], requires_grad=True)
    spread = batch.scatter(at_actions)
    assert spread.tolist() == [[0, 0, 1, 2, 0, 0, 0, 0], [0, 0, 3, 4, 0, 0, 0, 5]]
    (spread * torch.arange(16.0).reshape(2, 8)).sum().backward()
    assert at_actions.grad.tolist() == [2, 3, 10, 11, 15]


def test_per_rollout_gives_each_rollout_its_own_tokens():
    batch = make_batch([[SHORT], turns()])
    rows = batch.per_rollout(torch.arange(16, dtype=torch.bfloat16).reshape(2, 8))
    assert [(name, values.tolist()) for name, values in rows] == [
        ("s", [2, 3]),
        ("t0", [10, 11]),
        ("t1", [15]),
    ]
    assert all(values.dtype == np.float32 for _, values in rows)


def test_per_rollout_returns_what_went_in():
    rollouts = [SHORT, *turns()]
    batch = make_batch([[SHORT], turns()])
    for rollout, (name, logprobs) in zip(
        rollouts, batch.per_rollout(batch.behavior_logprobs), strict=True
    ):
        assert name == rollout.id
        assert np.array_equal(logprobs, rollout.behavior_logprobs)


def test_the_prompt_key_is_of_the_prompt_alone():
    other_answer = make_rollout("b", prompt=[5, 6], tokens=[9])
    assert prompt_key(SHORT) == prompt_key(other_answer)
    assert prompt_key(SHORT) != prompt_key(make_rollout(prompt=[5, 7]))
    # 5, 6 is not 5 with a 6 packed in another width
    assert prompt_key(SHORT) != prompt_key(make_rollout(prompt=[5, 6, 0]))
    wide = replace(SHORT, prompt_token_ids=SHORT.prompt_token_ids.astype(np.int64))
    assert prompt_key(wide) == prompt_key(SHORT)


@pytest.mark.parametrize(
    ("trajectory", "says"),
    [
        ([make_rollout("x", reward=None)], "x has no reward"),
        ([make_rollout("x", tokens=[])], "x has no tokens"),
        ([make_rollout("x", prompt=[])], "x has no tokens"),
        ([make_rollout("x", logprobs=[-1.0])], "x has not one behavior log-prob per token"),
        ([], "no rollout"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(trajectory, says):
    with pytest.raises(LearnerError, match=says):
        make_batch([[SHORT], trajectory])


def test_no_trajectory_at_all_is_refused():
    with pytest.raises(LearnerError, match="no rollout"):
        make_batch([])


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7, 99, 9],  # another token in the first answer
        [5, 6, 7],  # cut short
        [6, 7, 8, 9],  # shifted
    ],
)
def test_a_turn_that_does_not_continue_the_history_is_refused(prompt):
    second = make_rollout("t1", prompt=prompt, tokens=[12])
    with pytest.raises(LearnerError, match="t1 does not continue its trajectory"):
        make_batch([[SHORT, second]])
