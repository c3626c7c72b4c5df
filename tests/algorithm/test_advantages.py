import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from online_sao.algorithm.advantages import (
    broadcast_advantages,
    group_advantages,
    length_adaptive_lambda,
    skip_observation_gae,
    step_level_advantages,
    value_targets,
)

NAN = math.nan
JUNK = [NAN, math.inf, -math.inf, 1e30]
"""What may stand outside the action mask."""

GRID = [(1.0, 1.0), (1.0, 0.0), (1.0, 0.9), (0.9, 1.0), (0.5, 0.5), (0.9, 0.0), (0.0, 0.7)]
"""gamma and lambda."""


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float32)


def mask_of(text):
    """'.aa.b' -> False True True False True: letters are action tokens."""
    return torch.tensor([[letter != "." for letter in text]])


def index_of(text):
    """'.aa.b' -> -1 0 0 -1 1: the action that each token belongs to."""
    return torch.tensor([[ord(letter) - ord("a") if letter != "." else -1 for letter in text]])


# by hand


def test_two_actions_with_an_observation_between_and_a_terminal_reward():
    # γ = λ = 1/2, so γλ = 1/4. Action tokens 0 1 | 2 3, V = 1 2 | 3 4, R = 10 on the last.
    #   δ3 = 10 − 4 = 6           A3 = 6
    #   δ2 = 4/2 − 3 = −1         A2 = −1 + 6/4 = 0.5
    #   δ1 = 3/2 − 2 = −0.5       A1 = −0.5 + 0.5/4 = −0.375    (the bridge: V of the next action)
    #   δ0 = 2/2 − 1 = 0          A0 = 0 − 0.375/4 = −0.09375
    mask = mask_of(".aa..bb.")
    values = row(NAN, 1, 2, NAN, 1e30, 3, 4, NAN)
    rewards = row(7, 0, 0, NAN, 7, 0, 10, 7)
    advantages = skip_observation_gae(values, rewards, mask, 0.5, 0.5)
    assert advantages.tolist() == [[0, -0.09375, -0.375, 0, 0, 0.5, 6, 0]]
    #   G3 = 10,  G2 = (4/2 + 10/2)/2 = 3.5,  G1 = (3/2 + 3.5/2)/2 = 1.625,
    #   G0 = (2/2 + 1.625/2)/2 = 0.90625
    targets = value_targets(values, rewards, mask, 0.5, 0.5)
    assert targets.tolist() == [[0, 0.90625, 1.625, 0, 0, 3.5, 10, 0]]
    assert advantages.dtype == targets.dtype == torch.float32


def test_three_actions_with_a_reward_for_each():
    # γ = 1, λ = 1/2. Action tokens 0 1 | 2 | 3 4, V = 1 2 | 3 | 4 5, R = 1, 2, 4 on 1, 2, 4.
    #   δ4 = 4 − 5 = −1           A4 = −1
    #   δ3 = 0 + 5 − 4 = 1        A3 = 1 − 1/2 = 0.5
    #   δ2 = 2 + 4 − 3 = 3        A2 = 3 + 0.5/2 = 3.25
    #   δ1 = 1 + 3 − 2 = 2        A1 = 2 + 3.25/2 = 3.625
    #   δ0 = 0 + 2 − 1 = 1        A0 = 1 + 3.625/2 = 2.8125
    mask = mask_of("aa.b..cc")
    values = row(1, 2, NAN, 3, NAN, NAN, 4, 5)
    rewards = row(0, 1, 0, 2, 0, 0, 0, 4)
    advantages = skip_observation_gae(values, rewards, mask, 1.0, 0.5)
    assert advantages.tolist() == [[2.8125, 3.625, 0, 3.25, 0, 0, 0.5, -1]]
    # λ = 1: what is still to come, 4 on the last action, 6 and 7 before
    targets = value_targets(values, rewards, mask, 1.0, 1.0)
    assert targets.tolist() == [[7, 7, 0, 6, 0, 0, 4, 4]]
    # γ = 1/2, λ = 1: 4, 2, 2 + 1, 1 + 3/2, 2.5/2
    targets = value_targets(values, rewards, mask, 0.5, 1.0)
    assert targets.tolist() == [[1.25, 2.5, 0, 3, 0, 0, 2, 4]]


@pytest.mark.parametrize(("gamma", "gae_lambda"), GRID)
def test_an_action_of_one_token_is_reward_minus_value(gamma, gae_lambda):
    mask = mask_of("..a.")
    values, rewards = row(NAN, NAN, 0.25, NAN), row(0, 0, 1, 0)
    advantages = skip_observation_gae(values, rewards, mask, gamma, gae_lambda)
    assert advantages.tolist() == [[0, 0, 0.75, 0]]
    targets = value_targets(values, rewards, mask, gamma, gae_lambda)
    assert targets.tolist() == [[0, 0, 1, 0]]


def test_lambda_zero_is_one_step_and_lambda_one_is_return_minus_value():
    mask = mask_of("aa.b")
    values, rewards = row(0.5, 0.25, NAN, 0.125), row(0, 0, 0, 1)
    # λ = 0: 0.25 − 0.5, 0.125 − 0.25, 1 − 0.125
    one_step = skip_observation_gae(values, rewards, mask, 1.0, 0.0)
    assert one_step.tolist() == [[-0.25, -0.125, 0, 0.875]]
    # λ = 1: 1 − V
    monte_carlo = skip_observation_gae(values, rewards, mask, 1.0, 1.0)
    assert monte_carlo.tolist() == [[0.5, 0.75, 0, 0.875]]


def test_length_adaptive_lambda_by_hand():
    mask = torch.zeros(4, 50, dtype=torch.bool)
    mask[0, 3] = True
    mask[1, [1, 5, 7, 9]] = True
    mask[2] = True
    # α = 1.5: l = 1: 1 − 2/3; l = 4: 1 − 1/6; l = 50: 1 − 1/75; no action tokens: 0
    torch.testing.assert_close(
        length_adaptive_lambda(mask, 1.5), torch.tensor([1 / 3, 5 / 6, 74 / 75, 0.0])
    )
    # α = 0.05 (VAPO's own): l = 1: 1 − 20 and l = 4: 1 − 5 are clamped; l = 50: 1 − 1/2.5
    torch.testing.assert_close(
        length_adaptive_lambda(mask, 0.05), torch.tensor([0.0, 0.0, 0.6, 0.0])
    )


@pytest.mark.parametrize("alpha", [0.0, -1.0, NAN])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(mask_of("a"), alpha)


# the definitions, as double loops


def gae_by_definition(values, rewards, mask, gamma, gae_lambda):
    """A_j = Σ_{k≥j} (γλ)^{k−j} δ_k over the action tokens of one trajectory."""
    tokens = [t for t in range(len(mask)) if mask[t]]
    result = [0.0] * len(mask)
    for j, t in enumerate(tokens):
        for k in range(j, len(tokens)):
            bridge = values[tokens[k + 1]] if k + 1 < len(tokens) else 0.0
            delta = rewards[tokens[k]] + gamma * bridge - values[tokens[k]]
            result[t] += (gamma * gae_lambda) ** (k - j) * delta
    return result


def targets_by_definition(values, rewards, mask, gamma, gae_lambda):
    """The λ-return as a mixture of n-step returns: (1 − λ) Σ_n λ^{n−1} G⁽ⁿ⁾ + λ^{rest} G."""
    tokens = [t for t in range(len(mask)) if mask[t]]
    result = [0.0] * len(mask)
    for j, t in enumerate(tokens):
        rest = len(tokens) - j
        discounted = 0.0
        for n in range(1, rest + 1):
            discounted += gamma ** (n - 1) * rewards[tokens[j + n - 1]]
            if n < rest:
                n_step = discounted + gamma**n * values[tokens[j + n]]
                result[t] += (1 - gae_lambda) * gae_lambda ** (n - 1) * n_step
        result[t] += gae_lambda ** (rest - 1) * discounted
    return result


def steps_by_definition(values, rewards, mask, index, gamma, alpha, pooling):
    steps = sorted({index[t] for t in range(len(mask)) if mask[t]})
    tokens = {i: [t for t in range(len(mask)) if mask[t] and index[t] == i] for i in steps}
    pooled = {}
    for i in steps:
        of_step = [values[t] for t in tokens[i]]
        pooled[i] = sum(of_step) / len(of_step) if pooling == "mean" else of_step[-1]
    gae_lambda = min(max(1 - 1 / (alpha * max(len(steps), 1)), 0.0), 1.0) if steps else 0.0
    result = [0.0] * len(mask)
    for n, i in enumerate(steps):
        for k in range(n, len(steps)):
            bridge = pooled[steps[k + 1]] if k + 1 < len(steps) else 0.0
            reward = sum(rewards[t] for t in tokens[steps[k]])
            delta = reward + gamma * bridge - pooled[steps[k]]
            for t in tokens[i]:
                result[t] += (gamma * gae_lambda) ** (k - n) * delta
    return result


@st.composite
def trajectories(draw, max_batch=3, max_tokens=12):
    """values, rewards, action_mask, action_index; junk outside the mask."""
    batch, tokens = draw(st.integers(1, max_batch)), draw(st.integers(1, max_tokens))
    number = st.floats(-4, 4, width=32)
    values, rewards, masks, indices = [], [], [], []
    for _ in range(batch):
        mask = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
        jumps = draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))
        index = list(itertools.accumulate(jumps))
        junk = st.sampled_from(JUNK)
        values.append([draw(number if counts else junk) for counts in mask])
        rewards.append([draw(number if counts else junk) for counts in mask])
        masks.append(mask)
        indices.append([i if counts else -1 for i, counts in zip(index, mask, strict=True)])
    return (
        torch.tensor(values),
        torch.tensor(rewards),
        torch.tensor(masks),
        torch.tensor(indices),
    )


unit = st.floats(0, 1, width=32)
FUNCTIONS = [
    pytest.param(skip_observation_gae, gae_by_definition, id="skip_observation_gae"),
    pytest.param(value_targets, targets_by_definition, id="value_targets"),
]


@pytest.mark.parametrize(("function", "definition"), FUNCTIONS)
@given(data=trajectories(), gamma=unit, gae_lambda=unit)
def test_recursions_agree_with_their_definitions(function, definition, data, gamma, gae_lambda):
    values, rewards, mask, _ = data
    result = function(values, rewards, mask, gamma, gae_lambda)
    expected = [
        definition(v, r, m, gamma, gae_lambda)
        for v, r, m in zip(values.tolist(), rewards.tolist(), mask.tolist(), strict=True)
    ]
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@given(data=trajectories(), gamma=unit, alpha=st.floats(0.1, 3))
def test_step_level_agrees_with_its_definition(pooling, data, gamma, alpha):
    values, rewards, mask, index = data
    result = step_level_advantages(values, rewards, mask, index, gamma, alpha, pooling)
    expected = [
        steps_by_definition(v, r, m, i, gamma, alpha, pooling)
        for v, r, m, i in zip(
            values.tolist(), rewards.tolist(), mask.tolist(), index.tolist(), strict=True
        )
    ]
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(data=trajectories(), gamma=unit, gae_lambda=unit)
def test_target_is_advantage_plus_value(data, gamma, gae_lambda):
    values, rewards, mask, _ = data
    advantages = skip_observation_gae(values, rewards, mask, gamma, gae_lambda)
    targets = value_targets(values, rewards, mask, gamma, gae_lambda)
    torch.testing.assert_close(targets[mask], (advantages + values)[mask], rtol=1e-5, atol=1e-5)


@given(data=trajectories(), gamma=unit)
def test_with_lambda_one_no_value_enters_the_target(data, gamma):
    values, rewards, mask, _ = data
    targets = value_targets(values, rewards, mask, gamma, 1.0)
    others = value_targets(torch.full_like(values, 3.0), rewards, mask, gamma, 1.0)
    assert torch.equal(targets, others)


# all functions of [B, T]: shape, padding, packing, order


def all_results(values, rewards, mask, index):
    lambdas = length_adaptive_lambda(mask, 1.5)
    return torch.stack(
        [
            skip_observation_gae(values, rewards, mask, 0.9, lambdas),
            value_targets(values, rewards, mask, 0.9, lambdas),
            step_level_advantages(values, rewards, mask, index, 0.9, 1.5, "mean"),
            step_level_advantages(values, rewards, mask, index, 0.9, 1.5, "last"),
        ]
    )


@given(data=trajectories())
def test_outside_the_mask_results_are_zero_and_inside_finite(data):
    results = all_results(*data)
    assert (results[:, ~data[2]] == 0).all()
    assert results[:, data[2]].isfinite().all()


@given(data=trajectories(), replacement=st.sampled_from([*JUNK, 0.0]))
def test_what_stands_outside_the_mask_never_matters(data, replacement):
    values, rewards, mask, index = data
    changed = all_results(
        values.masked_fill(~mask, replacement),
        rewards.masked_fill(~mask, replacement),
        mask,
        index.masked_fill(~mask, 99),
    )
    assert torch.equal(all_results(*data), changed)


@given(first=trajectories(max_batch=1), second=trajectories(max_batch=1))
def test_two_trajectories_packed_in_one_batch_equal_each_alone(first, second):
    longest = max(first[2].shape[1], second[2].shape[1])
    blanks = (NAN, NAN, False, -1)

    def padded(x, blank):
        return torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=blank)

    both = [
        torch.cat([padded(a, blank), padded(b, blank)])
        for a, b, blank in zip(first, second, blanks, strict=True)
    ]
    together = all_results(*both)
    for i, alone in enumerate((first, second)):
        tokens = alone[2].shape[1]
        assert torch.equal(together[:, i : i + 1, :tokens], all_results(*alone))
        assert (together[:, i, tokens:] == 0).all()


@given(data=trajectories(max_batch=1), gaps=st.lists(st.integers(0, 3), min_size=13, max_size=13))
def test_observations_inserted_along_time_change_nothing(data, gaps):
    """Padding in front, at the end, between actions and within one."""
    tokens = data[2].shape[1]
    at = [t + sum(gaps[: t + 1]) for t in range(tokens)]
    longer = at[-1] + 1 + gaps[tokens]
    stretched = []
    for x, blank in zip(data, (NAN, math.inf, False, -1), strict=True):
        wide = torch.full((1, longer), blank, dtype=x.dtype)
        wide[:, at] = x
        stretched.append(wide)
    assert torch.equal(all_results(*stretched)[..., at], all_results(*data))


@given(data=trajectories(), seed=st.integers(0, 99))
def test_permuting_the_batch_permutes_the_result(data, seed):
    batch = data[2].shape[0]
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    permuted = all_results(*(x[order] for x in data))
    assert torch.equal(permuted, all_results(*data)[:, order])


def test_a_lambda_for_each_row_is_used_for_that_row():
    mask = mask_of("aa.b").expand(2, 4)
    values, rewards = row(0.5, 0.25, NAN, 0.125).expand(2, 4), row(0, 0, 0, 1).expand(2, 4)
    both = skip_observation_gae(values, rewards, mask, 1.0, torch.tensor([0.0, 1.0]))
    assert both.tolist() == [[-0.25, -0.125, 0, 0.875], [0.5, 0.75, 0, 0.875]]


def test_the_state_before_an_action_counts_also_when_its_token_is_an_observation():
    # values[t] is V of the state before token t; for the first token of action b that state
    # ends in an observation, and its value bridges from action a.
    mask, rewards = mask_of("a.b"), row(0, 0, 1)
    low = skip_observation_gae(row(0.5, 0, 0.25), rewards, mask, 1.0, 0.0)
    high = skip_observation_gae(row(0.5, 0, 0.75), rewards, mask, 1.0, 0.0)
    assert low.tolist() == [[-0.25, 0, 0.75]]
    assert high.tolist() == [[0.25, 0, 0.25]]


def test_results_are_constants_and_low_precision_inputs_are_summed_precisely():
    mask = torch.ones(1, 1000, dtype=torch.bool)
    values = torch.zeros(1, 1000, requires_grad=True)
    rewards = torch.full((1, 1000), 1 / 128, dtype=torch.bfloat16)
    index = torch.zeros(1, 1000, dtype=torch.int64)
    for result in all_results(values, rewards, mask, index):
        assert not result.requires_grad
        assert result.dtype == torch.float32
    returns = value_targets(values, rewards, mask, 1.0, 1.0)
    # 1000, 999, ... 1 times 1/128; bfloat16 sums would stop growing at 2
    torch.testing.assert_close(returns[0], torch.arange(1000, 0, -1) / 128, rtol=1e-7, atol=0)


def test_a_trajectory_without_action_tokens_gives_zeros():
    mask = torch.tensor([[False, False], [False, True]])
    values, rewards = torch.full((2, 2), NAN), torch.full((2, 2), NAN)
    values[1, 1], rewards[1, 1] = 0.25, 1.0
    index = torch.tensor([[-1, -1], [-1, 0]])
    results = all_results(values, rewards, mask, index)
    assert (results[:, 0] == 0).all()
    assert results[:, 1, 1].tolist() == [0.75, 1.0, 0.75, 0.75]
    nothing = all_results(values[:1], rewards[:1], mask[:1], index[:1])
    assert torch.equal(nothing, torch.zeros(4, 1, 2))


# step level


def test_step_level_by_hand():
    # Tokens a a | b b, V = 1 3 | 2 6, R = 0 1 | 0 7. Two steps: λ = 1 − 1/(1.5·2) = 2/3.
    mask, index = mask_of("aa.bb"), index_of("aa.bb")
    values, rewards = row(1, 3, NAN, 2, 6), row(0, 1, NAN, 0, 7)
    # mean: V = 2, 4; δ1 = 7 − 4 = 3; δ0 = 1 + 4 − 2 = 3; A0 = 3 + 2/3·3 = 5
    mean = step_level_advantages(values, rewards, mask, index, 1.0, 1.5, "mean")
    torch.testing.assert_close(mean, row(5, 5, 0, 3, 3))
    # last: V = 3, 6; δ1 = 7 − 6 = 1; δ0 = 1 + 6 − 3 = 4; A0 = 4 + 2/3
    last = step_level_advantages(values, rewards, mask, index, 1.0, 1.5, "last")
    torch.testing.assert_close(last, row(14 / 3, 14 / 3, 0, 1, 1))
    # γ = 1/2, mean: δ0 = 1 + 4/2 − 2 = 1; A0 = 1 + 1/2·2/3·3 = 2
    mean = step_level_advantages(values, rewards, mask, index, 0.5, 1.5, "mean")
    torch.testing.assert_close(mean, row(2, 2, 0, 3, 3))


def test_rewards_within_a_step_are_summed():
    mask, index = mask_of("aaa"), index_of("aaa")
    values, rewards = row(1, 2, 3), row(1, 2, 4)
    # one step: R − V = 7 − 2 and 7 − 3
    for pooling, expected in (("mean", 5.0), ("last", 4.0)):
        result = step_level_advantages(values, rewards, mask, index, 1.0, 1.5, pooling)
        assert result.tolist() == [[expected] * 3]


def test_steps_without_a_token_in_the_mask_do_not_exist():
    """As when earlier turns are masked: the numbering of what is left does not matter."""
    values, rewards, mask = row(NAN, 1, 3, 2, 6), row(NAN, 0, 1, 0, 7), mask_of(".aabb")
    expected = row(0, 5, 5, 3, 3)
    for indices in ([-1, 0, 0, 1, 1], [7, 2, 2, 5, 5], [0, 1, 1, 2, 2]):
        index = torch.tensor([indices])
        result = step_level_advantages(values, rewards, mask, index, 1.0, 1.5, "mean")
        torch.testing.assert_close(result, expected)


def test_few_steps_do_not_make_lambda_negative():
    # α = 0.25, two steps: 1 − 1/0.5 = −1 is clamped to 0, so A = δ = 3, 3 as above
    mask, index = mask_of("aabb"), index_of("aabb")
    result = step_level_advantages(row(1, 3, 2, 6), row(0, 1, 0, 7), mask, index, 1.0, 0.25, "mean")
    assert result.tolist() == [[3, 3, 3, 3]]


@pytest.mark.parametrize(
    ("index", "pooling", "message"),
    [
        ([1, 0], "mean", "action_index"),
        ([-1, 0], "mean", "action_index"),
        ([0, 1], "first", "pooling"),
    ],
)
def test_step_level_refuses_what_it_cannot_mean(index, pooling, message):
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        step_level_advantages(x, x, mask_of("ab"), torch.tensor([index]), 1.0, 1.5, pooling)


# one advantage per trajectory


def test_broadcast_copies_to_action_tokens_only():
    mask = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])
    advantages = torch.tensor([0.5, -2.0, NAN], requires_grad=True)
    result = broadcast_advantages(advantages, mask)
    assert result.tolist() == [[0, 0.5, 0.5], [-2, 0, 0], [0, 0, 0]]
    assert not result.requires_grad


def test_group_advantages_by_hand():
    # mean 1/4, deviations 3/4 and −1/4; std = √((9/16 + 3·1/16)/4) = √3/4
    result = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    root = math.sqrt(3)
    expected = torch.tensor([root, -1 / root, -1 / root, -1 / root])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)
    # eps is added to the std: 0.5 / (0.5 + 0.5)
    halved = group_advantages(torch.tensor([1.0, 0.0]), eps=0.5)
    assert halved.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_of_equal_rewards_teaches_nothing(reward):
    assert group_advantages(torch.full((7,), reward)).tolist() == [0.0] * 7


@pytest.mark.parametrize("shape", [(1,), (0,), (2, 2)])
def test_a_group_needs_two_rewards(shape):
    with pytest.raises(ValueError, match="two rewards"):
        group_advantages(torch.ones(shape))


# a Markov chain with known values

# Four layers of two states, left to right; from each layer the walk ends with probability 0.2
# (always after the fourth). State s of layer i has the number 2i + s and pays REWARD when left.
LAYERS, ENDS = 4, 0.2
MOVE = ((0.7, 0.3), (0.4, 0.6))
REWARD = (0.0, 1.0, -0.5, 2.0, 0.25, 0.0, 1.5, -1.0)


def walks():
    """Every walk as (probability, states), from a uniform start."""

    def go_on(probability, states):
        layer, s = divmod(states[-1], 2)
        if layer == LAYERS - 1:
            yield probability, states
            return
        yield probability * ENDS, states
        for to in (0, 1):
            further = [*states, 2 * (layer + 1) + to]
            yield from go_on(probability * (1 - ENDS) * MOVE[s][to], further)

    for start in (0, 1):
        yield from go_on(0.5, [start])


def transition_matrix():
    matrix = torch.zeros(2 * LAYERS, 2 * LAYERS, dtype=torch.float64)
    for layer in range(LAYERS - 1):
        for s, to in itertools.product((0, 1), repeat=2):
            matrix[2 * layer + s, 2 * layer + 2 + to] = (1 - ENDS) * MOVE[s][to]
    return matrix


def chain_batch():
    """All walks as one batch, an observation after every second action token."""
    probabilities, tokens = zip(*walks(), strict=True)
    slots = [t + t // 2 for t in range(LAYERS)]
    states = torch.full((len(tokens), slots[-1] + 2), -1)
    for i, walk in enumerate(tokens):
        states[i, slots[: len(walk)]] = torch.tensor(walk)
    return torch.tensor(probabilities, dtype=torch.float64), states


def expectation_by_state(per_token, probabilities, states):
    """E[x | state], exactly: the batch holds every walk with its probability."""
    weights = probabilities[:, None].expand(states.shape)
    result = torch.zeros(2 * LAYERS, dtype=torch.float64)
    for state in range(2 * LAYERS):
        here = states == state
        result[state] = (weights * per_token.double())[here].sum() / weights[here].sum()
    return result


@pytest.mark.parametrize(("gamma", "gae_lambda"), GRID)
def test_markov_chain_expectations_have_their_closed_form(gamma, gae_lambda):
    """For any critic V̂: E[A | s] = (I − γλP)⁻¹ (R + γPV̂ − V̂), and 0 where V̂ is the value."""
    probabilities, states = chain_batch()
    assert probabilities.sum().item() == pytest.approx(1.0)
    mask = states >= 0
    reward, P = torch.tensor(REWARD, dtype=torch.float64), transition_matrix()
    identity = torch.eye(2 * LAYERS, dtype=torch.float64)
    true_values = torch.linalg.solve(identity - gamma * P, reward)
    guess = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -0.25, 0.75, 0.0], dtype=torch.float64)
    for v in (true_values, guess):
        values = v[states].masked_fill(~mask, NAN).float()
        rewards = reward[states].masked_fill(~mask, NAN).float()
        advantages = skip_observation_gae(values, rewards, mask, gamma, gae_lambda)
        expected = torch.linalg.solve(identity - gamma * gae_lambda * P, reward + gamma * P @ v - v)
        actual = expectation_by_state(advantages, probabilities, states)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        if v is true_values:
            torch.testing.assert_close(actual, torch.zeros_like(actual), rtol=0, atol=1e-6)
        targets = value_targets(values, rewards, mask, gamma, gae_lambda)
        actual = expectation_by_state(targets, probabilities, states)
        torch.testing.assert_close(actual, expected + v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("gamma", "gae_lambda"), GRID)
def test_a_critic_fitted_to_its_targets_converges_to_the_closed_form(gamma, gae_lambda):
    probabilities, states = chain_batch()
    mask = states >= 0
    reward, P = torch.tensor(REWARD, dtype=torch.float64), transition_matrix()
    true_values = torch.linalg.solve(torch.eye(2 * LAYERS, dtype=torch.float64) - gamma * P, reward)
    rewards = reward[states].masked_fill(~mask, NAN).float()
    v = torch.full((2 * LAYERS,), 5.0, dtype=torch.float64)
    for _ in range(LAYERS):
        values = v[states].masked_fill(~mask, NAN).float()
        targets = value_targets(values, rewards, mask, gamma, gae_lambda)
        v = expectation_by_state(targets, probabilities, states)
    torch.testing.assert_close(v, true_values, rtol=1e-5, atol=1e-5)
