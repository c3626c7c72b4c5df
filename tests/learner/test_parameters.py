"""Float32 masters under a bfloat16 model."""

import pytest
import torch
from torch.nn import Parameter

from online_sao.learner.parameters import CLIP_MIN_SAMPLES, TrainedParameters


def make(*named, betas=(0.9, 0.95), weight_decay=0.0, **settings):
    return TrainedParameters(named, betas=betas, weight_decay=weight_decay, **settings)


def bf16(*values):
    return Parameter(torch.tensor(values, dtype=torch.bfloat16))


def push(parameters, parameter, gradient, lr=0.1):
    """One step against `gradient`; its norm."""
    parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    norm = parameters.collect_gradients()
    parameters.step(lr, norm)
    return norm


def test_steps_that_bfloat16_would_lose_add_up():
    # Near 1 bfloat16 has steps of 1/256 below and 1/128 above: 1 - 1e-5 rounds to 1.
    weight, alone = bf16(1.0), bf16(1.0)
    parameters = make(("w", weight))
    plain = torch.optim.AdamW([alone], lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(600):
        push(parameters, weight, [1.0], lr=1e-5)  # AdamW: each step is lr long
        alone.grad = torch.ones_like(alone)
        plain.step()
        if step == 0:
            assert parameters.masters()["w"].item() == pytest.approx(1 - 1e-5, abs=6e-8)
            assert weight.item() == 1.0
    assert parameters.masters()["w"].item() == pytest.approx(1 - 600e-5, abs=2e-5)
    # 0.994 lies between 0.9921875 and 0.99609375; the first is nearer
    assert weight.item() == 0.9921875
    assert alone.item() == 1.0  # what would have happened without masters


def test_the_model_is_the_rounded_master():
    weight = Parameter(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).bfloat16())
    start = weight.detach().clone()
    parameters = make(("w", weight))
    weight.grad = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    parameters.step(0.01, parameters.collect_gradients())
    assert torch.equal(weight.detach(), parameters.masters()["w"].bfloat16())
    assert not torch.equal(weight.detach(), start)
    assert weight.dtype == torch.bfloat16
    assert parameters.masters()["w"].dtype == torch.float32


def test_decay_moves_the_master_a_share_of_the_way_and_the_moments_not_at_all():
    weight, alone = bf16(1.0, 3.0), bf16(1.0, 3.0)
    parameters, plain = make(("w", weight)), make(("w", alone))
    for both, tensor in ((parameters, weight), (plain, alone)):
        push(both, tensor, [2.0, 1.0], lr=0.0)
    weight.grad = torch.tensor([2.0, 1.0], dtype=torch.bfloat16)
    norm = parameters.collect_gradients()
    parameters.step(0.0, norm, 0.25, {"w": torch.tensor([2.0, 1.0], dtype=torch.bfloat16)})
    push(plain, alone, [2.0, 1.0], lr=0.0)
    # 1 + (2 - 1) / 4 and 3 + (1 - 3) / 4
    assert parameters.masters()["w"].tolist() == [1.25, 2.5]
    assert weight.tolist() == [1.25, 2.5]
    for name, moment in plain.optimizer_tensors().items():
        assert torch.equal(parameters.optimizer_tensors()[name], moment)


def test_gradients_of_two_backward_passes_add_up_in_float32():
    weight = bf16(1.0)
    parameters = make(("w", weight), betas=(0.0, 0.95))  # exp_avg is the last gradient
    weight.grad = torch.tensor([1.0], dtype=torch.bfloat16)
    assert parameters.collect_gradients() == 1.0
    assert weight.grad is None
    weight.grad = torch.tensor([2.0**-9], dtype=torch.bfloat16)  # lost in a bfloat16 sum
    norm = parameters.collect_gradients()
    assert norm == 1 + 2.0**-9
    parameters.step(0.1, norm)
    assert parameters.optimizer_tensors()["w.exp_avg"].item() == 1 + 2.0**-9


def test_the_norm_is_over_all_tensors():
    first, second = bf16(1.0, 1.0), Parameter(torch.ones(1))
    parameters = make(("a", first), ("b", second))
    first.grad = torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
    second.grad = torch.tensor([6.0])
    assert parameters.collect_gradients() == 7.0  # sqrt(4 + 9 + 36)


def test_without_gradients_the_norm_is_zero():
    assert make(("w", bf16(1.0))).collect_gradients() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_shows_in_the_norm(bad):
    good, weight = bf16(1.0), bf16(1.0, 1.0)
    parameters = make(("g", good), ("w", weight))
    good.grad = torch.ones_like(good)
    weight.grad = torch.tensor([1.0, bad], dtype=torch.bfloat16)
    assert not torch.isfinite(torch.tensor(parameters.collect_gradients()))
    parameters.drop_gradients()
    assert parameters.collect_gradients() == 0.0


def test_a_float32_tensor_is_its_own_master():
    weight = Parameter(torch.ones(2))
    parameters = make(("w", weight))
    assert parameters.masters()["w"].data_ptr() == weight.data_ptr()
    push(parameters, weight, [1.0, -1.0], lr=0.25)
    assert weight.tolist() == pytest.approx([0.75, 1.25], abs=1e-6)
    assert weight.grad is None


def test_a_step_is_adamw_with_weight_decay():
    weight = Parameter(torch.tensor([2.0]))
    parameters = make(("w", weight), weight_decay=0.5)
    push(parameters, weight, [3.0], lr=0.1)
    # decay: 2 * (1 - 0.1 * 0.5) = 1.9; first Adam step: lr long
    assert weight.item() == pytest.approx(1.8, abs=1e-6)


def test_learning_rate_zero_moves_nothing():
    weight, own = bf16(0.3, -7.0), Parameter(torch.tensor([0.1]))
    parameters = make(("w", weight), ("o", own), weight_decay=0.5)
    before = weight.detach().clone(), own.detach().clone()
    weight.grad, own.grad = torch.ones_like(weight), torch.ones_like(own)
    parameters.step(0.0, parameters.collect_gradients())
    assert torch.equal(weight.detach(), before[0])
    assert torch.equal(own.detach(), before[1])


class TestClip:
    """With beta1 = 0, exp_avg is the gradient that the optimiser was given."""

    def given(self, parameters):
        return parameters.optimizer_tensors()["w.exp_avg"].item()

    def filled(self, quantile, norms, window=128):
        weight = Parameter(torch.ones(1))
        parameters = make(
            ("w", weight), betas=(0.0, 0.95), clip_quantile=quantile, clip_window=window
        )
        for norm in norms:
            push(parameters, weight, [norm])
        return parameters, weight

    @pytest.mark.parametrize(
        ("quantile", "limit"), [(0.5, 4.0), (0.51, 5.0), (1.0, 8.0), (0.01, 1.0)]
    )
    def test_at_a_quantile_of_the_past(self, quantile, limit):
        # of the norms 1 to 8, the 0.5 quantile is the 4th smallest
        parameters, weight = self.filled(quantile, [8.0, 1, 7, 2, 6, 3, 5, 4])
        assert push(parameters, weight, [40.0]) == 40.0
        assert self.given(parameters) == pytest.approx(limit, rel=1e-6)

    def test_keeps_the_direction(self):
        weight = Parameter(torch.ones(2))
        parameters = make(("w", weight), betas=(0.0, 0.95), clip_quantile=1.0)
        for _ in range(8):
            push(parameters, weight, [1.0, 0.0])
        push(parameters, weight, [-30.0, 40.0])
        assert parameters.optimizer_tensors()["w.exp_avg"].tolist() == pytest.approx([-0.6, 0.8])

    def test_a_smaller_gradient_is_left_alone(self):
        parameters, weight = self.filled(0.5, [1.0, 2, 3, 4, 5, 6, 7, 8])
        push(parameters, weight, [3.5])
        assert self.given(parameters) == 3.5

    def test_too_few_norms_are_no_guide(self):
        parameters, weight = self.filled(0.5, [1.0] * (CLIP_MIN_SAMPLES - 1))
        push(parameters, weight, [40.0])
        assert self.given(parameters) == 40.0

    def test_off_by_default(self):
        parameters, weight = self.filled(None, [1.0] * 20)
        push(parameters, weight, [40.0])
        assert self.given(parameters) == 40.0

    def test_the_past_is_a_window_of_norms_before_clipping(self):
        parameters, weight = self.filled(1.0, [90.0] + [1.0] * 8, window=8)
        assert parameters.state_dict() == {"norms": [1.0] * 8}
        push(parameters, weight, [40.0])
        assert self.given(parameters) == 1.0
        assert parameters.state_dict() == {"norms": [1.0] * 7 + [40.0]}


def test_masters_are_loaded_into_the_model_too():
    weight, own = bf16(1.0, 2.0), Parameter(torch.zeros(1))
    parameters = make(("w", weight), ("o", own))
    parameters.load_masters({"w": torch.tensor([0.994, 3.0]), "o": torch.tensor([5.0])})
    assert parameters.masters()["w"].tolist() == pytest.approx([0.994, 3.0])
    assert weight.tolist() == [0.9921875, 3.0]
    assert own.tolist() == [5.0]


def test_a_missing_master_is_an_error():
    with pytest.raises(KeyError):
        make(("w", bf16(1.0))).load_masters({})


def test_optimizer_state_moves_to_another_instance_bit_by_bit():
    def gradients(step):
        return torch.randn(5, generator=torch.Generator().manual_seed(step)).tolist()

    def fresh():
        weight = bf16(1.0, -2.0, 0.5, 3.0, 0.25)
        return make(("w", weight), clip_quantile=0.5), weight

    straight, weight = fresh()
    for step in range(20):
        push(straight, weight, gradients(step), lr=1e-3)
    first, its_weight = fresh()
    for step in range(10):
        push(first, its_weight, gradients(step), lr=1e-3)
    second, weight_2 = fresh()
    second.load_masters(first.masters())
    second.load_optimizer_tensors(first.optimizer_tensors())
    second.load_state_dict(first.state_dict())
    for step in range(10, 20):
        push(second, weight_2, gradients(step), lr=1e-3)
    assert torch.equal(straight.masters()["w"], second.masters()["w"])
    assert torch.equal(weight, weight_2)
    assert straight.state_dict() == second.state_dict()
    wanted, found = straight.optimizer_tensors(), second.optimizer_tensors()
    assert wanted.keys() == found.keys() == {"w.step", "w.exp_avg", "w.exp_avg_sq"}
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    assert found["w.step"].item() == 20


def test_loaded_optimizer_state_is_a_copy():
    weight = bf16(1.0)
    parameters = make(("w", weight))
    push(parameters, weight, [1.0])
    given = {key: tensor.clone() for key, tensor in parameters.optimizer_tensors().items()}
    kept = {key: tensor.clone() for key, tensor in given.items()}
    parameters.load_optimizer_tensors(given)
    push(parameters, weight, [1.0])
    assert all(torch.equal(given[key], kept[key]) for key in given)


def test_before_the_first_step_there_is_no_optimizer_state():
    weight = bf16(1.0)
    parameters = make(("w", weight))
    assert parameters.optimizer_tensors() == {}
    push(parameters, weight, [1.0])
    parameters.load_optimizer_tensors({})
    assert parameters.optimizer_tensors() == {}


def test_an_incomplete_optimizer_state_is_an_error():
    weight = bf16(1.0)
    parameters = make(("w", weight))
    push(parameters, weight, [1.0])
    partial = dict(parameters.optimizer_tensors())
    del partial["w.exp_avg_sq"]
    with pytest.raises(KeyError):
        parameters.load_optimizer_tensors(partial)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_restore_undoes_steps(steps_before):
    weight = bf16(1.0)
    parameters = make(("w", weight), clip_quantile=0.5)
    for _ in range(steps_before):
        push(parameters, weight, [1.0])
    value = weight.item()
    kept = parameters.snapshot()
    push(parameters, weight, [2.0])
    push(parameters, weight, [3.0])
    parameters.restore(kept)
    assert weight.item() == value
    assert parameters.state_dict() == {"norms": [1.0] * steps_before}
    state = parameters.optimizer_tensors()
    assert (state["w.step"].item() if state else 0) == steps_before
