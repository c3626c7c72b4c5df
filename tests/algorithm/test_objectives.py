import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from online_sao.algorithm.advantages import value_targets
from online_sao.algorithm.objectives import (
    entropy,
    kl_from_reference,
    kl_to_reference,
    policy_loss,
    value_loss,
)

INF, NAN = math.inf, math.nan
OBJECTIVES = ["dis", "ppo_clip", "tis", "icepop", "none"]
LOG2 = math.log(2)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float32)


def loss_and_gradient(policy, behavior, advantages, mask, **settings):
    """The loss as a number, its gradient by policy log-prob, and the metrics as numbers."""
    settings = {"objective": "dis", "eps_low": 0.3, "eps_high": 5.0, **settings}
    policy = policy.clone().requires_grad_()
    loss, metrics = policy_loss(policy, behavior, advantages, mask, **settings)
    loss.backward()
    return loss.item(), policy.grad, {name: float(metric) for name, metric in metrics.items()}


# Four tokens, the second an observation:
#   π 0.5, π_rollout 0.25: r = 2, A = 1
#   π 0.25, π_rollout 0.5: r = 0.5, A = 1
#   π = π_rollout = 0.125: r = 1, A = −2
# N = 3; log π = −L, −2L, −3L with L = log 2.
MASK = torch.tensor([[True, False, True, True]])
POLICY = row(-LOG2, NAN, -2 * LOG2, -3 * LOG2)
BEHAVIOR = row(-2 * LOG2, INF, -LOG2, -3 * LOG2)
ADVANTAGES = row(1, NAN, 1, -2)

BY_HAND = {
    # r = 0.5 is outside (0.7, 6): −(2·1·(−L) + 0 + 1·(−2)·(−3L))/3 = −(−2L + 6L)/3
    "dis": ({}, -4 * LOG2 / 3, [-2 / 3, 0, 0, 2 / 3], 1 / 3),
    # as dis, with 0.5·1·(−2L) = −L more in the bracket
    "none": ({"objective": "none"}, -3 * LOG2 / 3, [-2 / 3, 0, -0.5 / 3, 2 / 3], 0.0),
    # r = 2 is cut to 1.5: −(−1.5L − L + 6L)/3
    "tis": (
        {"objective": "tis", "tis_cap": 1.5},
        -3.5 * LOG2 / 3,
        [-1.5 / 3, 0, -0.5 / 3, 2 / 3],
        1 / 3,
    ),
    # r = 2 is above the upper bound 1.75: −(−L + 6L)/3
    "icepop": (
        {"objective": "icepop", "icepop_low": 0.25, "icepop_high": 1.75},
        -5 * LOG2 / 3,
        [0, 0, -0.5 / 3, 2 / 3],
        1 / 3,
    ),
    # clip-higher (0.8, 1.28): −(min(2, 1.28) + min(0.5, 0.8) + min(−2, −2))/3 = 0.22/3;
    # the clipped token has no gradient, the others −r·A/3
    "ppo_clip": (
        {"objective": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
        0.22 / 3,
        [0, 0, -0.5 / 3, 2 / 3],
        1 / 3,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_policy_loss_by_hand(name):
    settings, expected_loss, expected_gradient, altered = BY_HAND[name]
    loss, gradient, metrics = loss_and_gradient(POLICY, BEHAVIOR, ADVANTAGES, MASK, **settings)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradient, row(*expected_gradient), rtol=1e-6, atol=0)
    assert metrics["policy/loss"] == loss
    assert metrics["policy/masked_fraction"] == pytest.approx(altered)


def test_metrics_by_hand():
    _, _, metrics = loss_and_gradient(POLICY, BEHAVIOR, ADVANTAGES, MASK)
    # r = 2, 0.5, 1
    assert metrics["policy/importance_ratio_mean"] == pytest.approx(3.5 / 3)
    assert metrics["policy/importance_ratio_max"] == pytest.approx(2.0)
    assert metrics["policy/logprob_gap"] == pytest.approx(2 * LOG2 / 3)
    # (2 − 1 − L) + (0.5 − 1 + L) + 0
    assert metrics["policy/k3_kl"] == pytest.approx(0.5 / 3)
    # 3.5² / (4 + 0.25 + 1)
    assert metrics["policy/effective_sample_size"] == pytest.approx(12.25 / 5.25)
    assert metrics["policy/non_finite_tokens"] == 0


def test_ppo_clip_acts_on_one_side_for_each_sign_of_the_advantage():
    # r = 2, 2, 0.5, 0.5 with A = 1, −1, 1, −1 and the interval (0.8, 1.28):
    # gains 1.28 (clipped), −2, 0.5, −0.8 (clipped)
    policy, behavior = row(LOG2, LOG2, -LOG2, -LOG2), torch.zeros(1, 4)
    mask = torch.ones(1, 4, dtype=torch.bool)
    settings = {"objective": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}
    loss, gradient, metrics = loss_and_gradient(
        policy, behavior, row(1, -1, 1, -1), mask, **settings
    )
    assert loss == pytest.approx(-(1.28 - 2 + 0.5 - 0.8) / 4)
    torch.testing.assert_close(gradient, row(0, 2, -0.5, 0) / 4)
    assert metrics["policy/masked_fraction"] == 0.5


def test_masked_tokens_stay_in_the_denominator():
    """Masking shrinks a step and never amplifies the rest."""
    policy, behavior, advantages = row(-1, -1, -1, -9), row(-1, -9, -9, -1), row(1, 1, 1, 1)
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, gradient, metrics = loss_and_gradient(policy, behavior, advantages, mask)
    assert gradient.tolist() == [[-0.25, 0, 0, 0]]
    assert metrics["policy/masked_fraction"] == 0.75


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_at_ratio_one_all_objectives_have_the_policy_gradient(objective):
    policy = row(-1.0, -2.0, -0.5)
    mask = torch.ones(1, 3, dtype=torch.bool)
    _, gradient, metrics = loss_and_gradient(
        policy, policy, row(1, -2, 0.5), mask, objective=objective
    )
    torch.testing.assert_close(gradient, -row(1, -2, 0.5) / 3)
    assert metrics["policy/masked_fraction"] == 0.0


# bounds


@pytest.mark.parametrize(("eps_low", "eps_high"), [(0.3, 5.0), (0.8, 3.0)])
def test_dis_masks_a_ratio_equal_to_a_bound(eps_low, eps_high):
    low = np.float32(math.log1p(-eps_low))
    high = np.float32(math.log1p(eps_high))
    log_ratio = torch.tensor(
        np.array([[low, np.nextafter(low, np.float32(0)), np.nextafter(high, np.float32(0)), high]])
    )
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, gradient, _ = loss_and_gradient(
        log_ratio, torch.zeros(1, 4), torch.ones(1, 4), mask, eps_low=eps_low, eps_high=eps_high
    )
    assert (gradient != 0).tolist() == [[False, True, True, False]]


def test_icepop_keeps_a_ratio_equal_to_a_bound():
    # bounds 0.5 and 2 as float32 exp gives them at ∓log 2
    bounds = {
        "icepop_low": float(row(-LOG2).exp()),
        "icepop_high": float(row(LOG2).exp()),
    }
    log_ratio = row(-LOG2 - 1e-6, -LOG2, LOG2, LOG2 + 1e-6)
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, gradient, _ = loss_and_gradient(
        log_ratio, torch.zeros(1, 4), torch.ones(1, 4), mask, objective="icepop", **bounds
    )
    assert (gradient != 0).tolist() == [[False, True, True, False]]


def test_unknown_objectives_and_bounds_without_meaning_are_refused():
    with pytest.raises(ValueError, match="unknown objective 'ppo'"):
        loss_and_gradient(POLICY, BEHAVIOR, ADVANTAGES, MASK, objective="ppo")
    with pytest.raises(ValueError, match="eps_low"):
        loss_and_gradient(POLICY, BEHAVIOR, ADVANTAGES, MASK, eps_low=1.5)


# gradients


def expected_weight(objective, ratio, advantage):
    """Gain per ∇log π from the definitions, with bounds far from the drawn ratios."""
    if objective == "dis":
        return ratio * advantage if 0.7 < ratio < 6.0 else 0.0
    if objective == "icepop":
        return ratio * advantage if 0.5 <= ratio <= 5.0 else 0.0
    if objective == "tis":
        return min(ratio, 2.0) * advantage
    if objective == "none":
        return ratio * advantage
    # ppo_clip: no gradient where the clipped branch is the smaller one
    clipped = (advantage > 0 and ratio > 6.0) or (advantage < 0 and ratio < 0.7)
    return 0.0 if clipped else ratio * advantage


token = st.tuples(
    st.integers(0, 3),  # which of four words was sampled
    st.sampled_from([0.1, 0.6, 0.9, 1.0, 1.7, 4.5, 5.5, 8.0]),  # its ratio
    st.floats(-3, 3, width=32),  # its advantage
    st.booleans(),  # is it an action token?
)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(
    tokens=st.lists(token, min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_autograd_equals_the_closed_form(objective, tokens, seed):
    """d loss / d logits = −(1/N) Σ w(r)·A·(onehot(a) − π): nothing else is differentiated."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, len(tokens), 4, generator=generator, requires_grad=True)
    words = torch.tensor([[word for word, *_ in tokens]])
    ratios = torch.tensor([[ratio for _, ratio, _, _ in tokens]])
    advantages = torch.tensor([[advantage for _, _, advantage, _ in tokens]], requires_grad=True)
    mask = torch.tensor([[counts for *_, counts in tokens]])
    policy = logits.log_softmax(-1).gather(-1, words[..., None])[..., 0]
    behavior = (policy.detach() - ratios.log()).requires_grad_()
    loss, _ = policy_loss(
        policy, behavior, advantages, mask, objective=objective, eps_low=0.3, eps_high=5.0
    )
    gradient, by_advantage, by_behavior = torch.autograd.grad(
        loss, [logits, advantages, behavior], allow_unused=True
    )
    weights = torch.tensor(
        [[expected_weight(objective, r, a) if counts else 0.0 for _, r, a, counts in tokens]]
    )
    score = torch.nn.functional.one_hot(words, 4) - logits.detach().softmax(-1)
    expected = -weights[..., None] * score / max(int(mask.sum()), 1)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    assert by_advantage is None
    if objective != "ppo_clip":  # whose ratio is differentiated by definition
        assert by_behavior is None


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("inside", [True, False], ids=["action", "padding"])
@pytest.mark.parametrize(
    ("policy", "behavior", "advantage"),
    [
        (-1.0, -101.0, 1.0),
        (-1.0, -90.0, -1.0),  # case C15: exp(89) overflows float32
        (-101.0, -1.0, 1.0),
        (-1.0, -1e4, -1.0),
        (-1e4, -1.0, -1.0),
        (-1.0, -INF, 1.0),
        (-INF, -1.0, 1.0),
        (-INF, -INF, 1.0),
        (INF, -1.0, 1.0),
        (NAN, -1.0, 1.0),
        (-1.0, NAN, 1.0),
        (-1.0, -1.0, NAN),
        (-1.0, -1.0, INF),
    ],
)
def test_loss_and_gradient_are_finite_whatever_one_token_holds(
    objective, inside, policy, behavior, advantage
):
    policies, behaviors = row(-1, policy, -2), row(-1, behavior, -2)
    advantages = row(0.5, advantage, -1)
    mask = torch.tensor([[True, inside, True]])
    settings = {"objective": objective}
    loss, gradient, metrics = loss_and_gradient(policies, behaviors, advantages, mask, **settings)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert all(math.isfinite(metric) for metric in metrics.values())
    # The other two tokens are at ratio 1: −A/N each, whatever stands between them.
    num_tokens = 3 if inside else 2
    torch.testing.assert_close(gradient[:, [0, 2]], row(-0.5, 1) / num_tokens)
    broken = inside and not math.isfinite(policy - behavior + advantage)
    assert metrics["policy/non_finite_tokens"] == broken
    if objective == "dis" or broken or not inside:
        # Masked: exactly zero gradient, and nothing added to the loss.
        assert gradient[0, 1] == 0.0
        rest = [-0.5 * -1, 1 * -2] if objective != "ppo_clip" else [-0.5, 1]
        assert loss == pytest.approx(sum(rest) / num_tokens)
        assert metrics["policy/masked_fraction"] == pytest.approx(1 / 3 if inside else 0)


def test_the_truncated_objectives_at_a_huge_ratio():
    policy, behavior, mask = row(-1.0), row(-101.0), torch.tensor([[True]])
    _, gradient, metrics = loss_and_gradient(policy, behavior, row(1), mask, objective="tis")
    assert gradient.item() == -2.0
    assert metrics["policy/importance_ratio_max"] == pytest.approx(math.exp(20))
    _, gradient, _ = loss_and_gradient(policy, behavior, row(1), mask, objective="none")
    assert gradient.item() == pytest.approx(-math.exp(20), rel=1e-6)
    _, gradient, _ = loss_and_gradient(policy, behavior, row(1), mask, objective="icepop")
    assert gradient.item() == 0.0


# masks, padding, parts


@st.composite
def batches(draw):
    """policy, behavior, advantages, mask [B, T] with ordinary numbers everywhere."""
    size = (draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    policy, behavior = (-3 * torch.rand(size, generator=generator) for _ in range(2))
    advantages = torch.randn(size, generator=generator)
    mask = torch.rand(size, generator=generator) < draw(st.sampled_from([0.2, 0.7, 1.0]))
    return policy, behavior, advantages, mask


def assert_same(first, second):
    loss, gradient, metrics = first
    other_loss, other_gradient, other_metrics = second
    assert loss == pytest.approx(other_loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-5, atol=1e-7)
    assert metrics == pytest.approx(other_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(batch=batches(), junk=st.sampled_from([NAN, INF, -INF, 1e4, 0.0]))
def test_what_stands_outside_the_mask_never_matters(objective, batch, junk):
    *inputs, mask = batch
    plain = loss_and_gradient(*inputs, mask, objective=objective)
    broken = [x.masked_fill(~mask, junk) for x in inputs]
    assert_same(loss_and_gradient(*broken, mask, objective=objective), plain)
    assert (plain[1][~mask] == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(batch=batches(), front=st.integers(0, 3), back=st.integers(0, 3))
def test_padding_changes_nothing(objective, batch, front, back):
    *inputs, mask = batch
    plain = loss_and_gradient(*inputs, mask, objective=objective)
    pad = torch.nn.functional.pad
    padded = [pad(x, (front, back), value=NAN) for x in inputs]
    loss, gradient, metrics = loss_and_gradient(
        *padded, pad(mask, (front, back)), objective=objective
    )
    assert_same((loss, gradient[:, front : front + mask.shape[1]], metrics), plain)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(batch=batches())
def test_rows_alone_with_a_common_normalizer_add_up_to_the_batch(objective, batch):
    mask = batch[3]
    num_tokens = max(int(mask.sum()), 1)
    loss, gradient, _ = loss_and_gradient(*batch, objective=objective)
    parts = [
        loss_and_gradient(
            *(x[i : i + 1] for x in batch), objective=objective, normalizer=float(num_tokens)
        )
        for i in range(mask.shape[0])
    ]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    together = torch.cat([part[1] for part in parts])
    torch.testing.assert_close(together, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(batch=batches(), seed=st.integers(0, 99))
def test_permuting_the_batch_permutes_the_gradient(objective, batch, seed):
    order = torch.randperm(batch[3].shape[0], generator=torch.Generator().manual_seed(seed))
    loss, gradient, metrics = loss_and_gradient(*batch, objective=objective)
    permuted = loss_and_gradient(*(x[order] for x in batch), objective=objective)
    assert_same(permuted, (loss, gradient[order], metrics))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_action_tokens_give_a_loss_of_zero(objective):
    x = torch.full((2, 3), NAN)
    loss, gradient, metrics = loss_and_gradient(
        x, x, x, torch.zeros(2, 3, dtype=torch.bool), objective=objective
    )
    assert loss == 0.0
    assert (gradient == 0).all()
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_metrics_are_detached_scalars(objective):
    policy = POLICY.clone().requires_grad_()
    loss, metrics = policy_loss(
        policy, BEHAVIOR, ADVANTAGES, MASK, objective=objective, eps_low=0.3, eps_high=5.0
    )
    assert loss.requires_grad
    assert loss.shape == ()
    assert all(m.shape == () and not m.requires_grad for m in metrics.values())


# critic


def test_value_loss_by_hand():
    # V = 1 2 . 4, G = 2 2 . 1: ((−1)² + 0 + 3²)/2/3 = 5/3; gradient (V − G)/3
    values = row(1, 2, INF, 4).requires_grad_()
    targets = row(2, 2, NAN, 1).requires_grad_()
    mask = torch.tensor([[True, True, False, True]])
    loss, metrics = value_loss(values, targets, mask)
    gradient, by_target = torch.autograd.grad(loss, [values, targets], allow_unused=True)
    assert loss.item() == pytest.approx(5 / 3)
    torch.testing.assert_close(gradient, row(-1, 0, 0, 3) / 3)
    assert by_target is None
    assert float(metrics["critic/loss"]) == loss.item()
    assert float(metrics["critic/value_mean"]) == pytest.approx(7 / 3)
    assert float(metrics["critic/value_target_mean"]) == pytest.approx(5 / 3)
    assert not any(m.requires_grad for m in metrics.values())
    halved, _ = value_loss(values, targets, mask, normalizer=6.0)
    assert halved.item() == pytest.approx(5 / 6)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_value_loss_reads_only_positions_that_precede_an_action_token(junk):
    # Prompt of two, action of two, observation of one, action of one. values[t] is the head's
    # output at position t − 1, so the outputs at 1, 2 and 4 count (4 is an observation token)
    # and those at 0, 3 and 5 do not.
    mask = torch.tensor([[False, False, True, True, False, True]])
    rewards = row(0, 0, 0, 0, 0, 1)
    outputs = {}
    for name, fill in (("plain", 0.0), ("junk", junk)):
        head = row(fill, 0.25, 0.5, fill, 0.75, fill).requires_grad_()
        values = torch.nn.functional.pad(head[:, :-1], (1, 0), value=fill)
        targets = value_targets(values, rewards, mask, 1.0, 1.0)
        loss, _ = value_loss(values, targets, mask)
        loss.backward()
        outputs[name] = (loss.item(), head.grad)
    # ((0.75)² + (0.5)² + (0.25)²)/2/3; gradient (V − 1)/3
    expected = row(0, -0.75, -0.5, 0, -0.25, 0) / 3
    for loss, gradient in outputs.values():
        assert loss == pytest.approx(0.875 / 6)
        torch.testing.assert_close(gradient, expected)
        assert gradient[0, [0, 3, 5]].tolist() == [0.0, 0.0, 0.0]


def test_value_loss_without_action_tokens_is_zero():
    values = torch.full((1, 2), NAN, requires_grad=True)
    loss, metrics = value_loss(values, values, torch.zeros(1, 2, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [[0.0, 0.0]]
    assert set(map(float, metrics.values())) == {0.0}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_value_loss_on_rewards_that_are_all_equal_is_finite(reward):
    """Case C17: the critic's first steps."""
    values = torch.zeros(4, 3, requires_grad=True)
    mask = torch.ones(4, 3, dtype=torch.bool)
    rewards = torch.zeros(4, 3)
    rewards[:, -1] = reward
    loss, _ = value_loss(values, value_targets(values, rewards, mask, 1.0, 1.0), mask)
    loss.backward()
    assert loss.item() == pytest.approx(reward / 2)
    torch.testing.assert_close(values.grad, torch.full((4, 3), -reward / 12))


# entropy and divergence


def test_entropy_by_hand():
    # (1/2, 1/4, 1/4): 1/2·L + 2·1/4·2L = 1.5 L; uniform over three: log 3
    logits = torch.tensor([[[0.5, 0.25, 0.25], [1, 1, 1], [NAN, INF, -INF]]]).log()
    logits[0, 1] += 100.0  # a constant changes nothing
    logits.requires_grad_()
    mask = torch.tensor([[True, True, False]])
    total = entropy(logits, mask)
    assert total.item() == pytest.approx(1.5 * LOG2 + math.log(3), rel=1e-6)
    total.backward()
    assert (logits.grad[~mask] == 0).all()
    # dH/dz = −π (log π + H); 1/2: −(−L + 1.5L)/2 = −L/4; 1/4: −(−2L + 1.5L)/4 = L/8; uniform: 0
    expected = torch.tensor([[-LOG2 / 4, LOG2 / 8, LOG2 / 8], [0, 0, 0]])
    torch.testing.assert_close(logits.grad[mask], expected, rtol=1e-5, atol=1e-6)
    assert entropy(logits, torch.zeros_like(mask)).item() == 0.0


def test_divergence_by_hand():
    # π = (1/2, 1/2), π_ref = (1/4, 3/4): (log 2 + log 2/3)/2 = 0.143841; the other way 0.130812
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert kl_to_reference(half, quarter).tolist() == pytest.approx([0.143841], rel=1e-5)
    assert kl_to_reference(quarter, half).tolist() == pytest.approx([0.130812], rel=1e-5)
    assert kl_from_reference(half, quarter).tolist() == pytest.approx([0.130812], rel=1e-5)
    assert kl_from_reference(quarter, half).tolist() == pytest.approx([0.143841], rel=1e-5)


def test_only_one_direction_still_pulls_when_an_action_is_all_but_gone():
    # π = (e, 1 − e) with e = 1e-6, π_ref = (1/2, 1/2), gradient to the first logit:
    # KL(π_ref ‖ π): π − π_ref = −0.499999
    # KL(π ‖ π_ref): π (log π/π_ref − KL) = 1e-6 (log 2e-6 − 0.693133) = −1.3815e-5
    logits = torch.tensor([[1e-6, 1 - 1e-6]], dtype=torch.float64).log().requires_grad_()
    even = torch.zeros(1, 2)
    (holds,) = torch.autograd.grad(kl_from_reference(logits, even).sum(), logits)
    (fades,) = torch.autograd.grad(kl_to_reference(logits, even).sum(), logits)
    assert holds.tolist()[0] == pytest.approx([-0.499999, 0.499999], rel=1e-4)
    assert fades[0, 0].item() == pytest.approx(-1.3815e-5, rel=1e-2)


@pytest.mark.parametrize("divergence", [kl_to_reference, kl_from_reference])
def test_divergence_of_a_policy_from_itself_is_zero_and_at_its_minimum(divergence):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    kl = divergence(logits, logits.detach() + 7.0)
    torch.testing.assert_close(kl, torch.zeros(3), rtol=0, atol=1e-6)
    kl.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(3, 50), rtol=0, atol=1e-6)


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
def test_entropy_and_divergence_have_the_gradients_of_their_definitions(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(3, 11, generator=generator, dtype=torch.float64)
    reference = spread * torch.randn(3, 11, generator=generator, dtype=torch.float64)
    weights = torch.rand(3, generator=generator)
    plain, ours = logits.clone().requires_grad_(), logits.float().requires_grad_()
    logprobs = plain.log_softmax(-1)
    expected_kl = (logprobs.exp() * (logprobs - reference.log_softmax(-1))).sum(-1)
    expected_entropy = -(logprobs.exp() * logprobs).sum()
    anchor = reference.float().requires_grad_()
    kl = kl_to_reference(ours, anchor)
    total = entropy(ours, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(kl, expected_kl.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total, expected_entropy.float(), rtol=1e-4, atol=1e-4)
    assert (kl > -1e-5).all()
    expected = torch.autograd.grad((weights * expected_kl).sum() + expected_entropy, plain)[0]
    by_policy, by_anchor = torch.autograd.grad(
        (weights * kl).sum() + total, [ours, anchor], allow_unused=True
    )
    torch.testing.assert_close(by_policy, expected.float(), rtol=1e-4, atol=1e-4)
    assert by_anchor is None


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
def test_divergence_from_the_reference_has_the_gradient_of_its_definition(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(3, 11, generator=generator, dtype=torch.float64)
    reference = spread * torch.randn(3, 11, generator=generator, dtype=torch.float64)
    weights = torch.rand(3, generator=generator)
    ours, anchor = logits.float().requires_grad_(), reference.float().requires_grad_()
    kl = kl_from_reference(ours, anchor)
    log_pi, log_ref = logits.log_softmax(-1), reference.log_softmax(-1)
    expected = (log_ref.exp() * (log_ref - log_pi)).sum(-1)
    torch.testing.assert_close(kl, expected.float(), rtol=1e-4, atol=1e-4)
    assert (kl > -1e-5).all()
    by_policy, by_anchor = torch.autograd.grad(
        (weights * kl).sum(), [ours, anchor], allow_unused=True
    )
    closed = weights[:, None] * (log_pi.exp() - log_ref.exp())  # π − π_ref
    torch.testing.assert_close(by_policy, closed.float(), rtol=1e-4, atol=1e-5)
    assert by_anchor is None


@pytest.mark.parametrize("divergence", [kl_to_reference, kl_from_reference])
def test_divergence_takes_low_precision_logits_and_works_in_float32(divergence):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    reference = torch.zeros(2, 9, dtype=torch.bfloat16)
    kl = divergence(logits, reference)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, divergence(logits.float(), reference.float()))
