"""The fused decoder against transformers: values, every gradient, and what it must refuse."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model

from online_sao.learner.critic import mlp_parameter_names
from online_sao.learner.fused_decoder import FusedDecoder

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "vocab_size": 90,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}


def make_body(heads=4, kv_heads=2, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | changes
    )
    body = LlamaModel(config).eval()
    for name, parameter in body.named_parameters():
        if "norm" in name:  # they start at one, which would hide a weight that is left out
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    body.set_attn_implementation("eager")
    return body


def states_and_gradients(call, body, ids, mask):
    """Hidden states at real positions, and the gradients of a loss over these."""
    torch.manual_seed(1)
    target = torch.randn(*ids.shape, body.config.hidden_size)[mask]
    states = call(ids)[mask]
    ((states.float() - target) ** 2).sum().backward()
    gradients = {name: p.grad.float() for name, p in body.named_parameters() if p.grad is not None}
    return states.detach().float(), gradients


def both(body, ids, mask=None):
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    twin = copy.deepcopy(body)
    expected = states_and_gradients(
        lambda ids: body(input_ids=ids, attention_mask=mask.long()).last_hidden_state,
        body,
        ids,
        mask,
    )
    return expected, states_and_gradients(FusedDecoder(twin), twin, ids, mask)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_values_and_all_gradients_are_those_of_transformers(heads, kv_heads, length):
    ids = torch.randint(90, (1, length), generator=torch.Generator().manual_seed(2))
    (states, gradients), (ours, our_gradients) = both(make_body(heads, kv_heads), ids)
    torch.testing.assert_close(ours, states, rtol=1e-5, atol=1e-5)
    assert our_gradients.keys() == gradients.keys()
    assert len(gradients) == 3 * 9 + 2  # layers, embeddings and the final norm
    for name, gradient in gradients.items():
        scale = gradient.abs().max().clamp_min(1e-3)
        torch.testing.assert_close(our_gradients[name] / scale, gradient / scale, rtol=0, atol=5e-5)


def test_padding_at_the_right_changes_nothing():
    ids = torch.randint(90, (3, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(12)[None] < torch.tensor([12, 5, 1])[:, None]
    (states, gradients), (ours, our_gradients) = both(make_body(), ids, mask)
    torch.testing.assert_close(ours, states, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(our_gradients[name] / scale, gradient / scale, rtol=0, atol=5e-5)


@pytest.mark.parametrize("chosen", ["mlp", "norms", "attention", "last layer", "value only"])
def test_frozen_parameters_get_no_gradient_and_the_others_the_same(chosen):
    body = make_body()
    wanted = {
        "mlp": lambda name: name in mlp_parameter_names(body),
        "norms": lambda name: "norm" in name,
        "attention": lambda name: "self_attn" in name,
        "last layer": lambda name: name.startswith("layers.2."),
        "value only": lambda name: name == "layers.1.self_attn.v_proj.weight",
    }[chosen]
    for name, parameter in body.named_parameters():
        parameter.requires_grad_(wanted(name))
    ids = torch.randint(90, (2, 9), generator=torch.Generator().manual_seed(4))
    (_, gradients), (_, ours) = both(body, ids)
    assert ours.keys() == gradients.keys() == {n for n, _ in body.named_parameters() if wanted(n)}
    for name, gradient in gradients.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(ours[name] / scale, gradient / scale, rtol=0, atol=5e-5)


def test_in_bfloat16_it_is_as_close_to_float32_as_transformers_is():
    ids = torch.randint(90, (1, 30), generator=torch.Generator().manual_seed(5))
    body = make_body()
    (states, gradients), _ = both(copy.deepcopy(body), ids)
    (theirs, their_gradients), (ours, our_gradients) = both(body.bfloat16(), ids)
    assert (ours - states).norm() < 1.2 * (theirs - states).norm()
    errors = [
        sum((g[name] - gradients[name]).square().sum() for name in gradients)
        for g in (our_gradients, their_gradients)
    ]
    assert errors[0] < 1.2**2 * errors[1]


def test_what_is_written_to_a_parameter_is_computed_with():
    body = make_body()
    fused, ids = FusedDecoder(body), torch.arange(8)[None]
    before = fused(ids)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(body.layers[1].self_attn, name).weight.mul_(1.5)
        body.layers[0].mlp.up_proj.weight.mul_(0.5)
    after = fused(ids)
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, body(input_ids=ids).last_hidden_state, rtol=1e-5, atol=1e-5)


def test_without_gradients_it_keeps_nothing():
    fused = FusedDecoder(make_body())
    with torch.no_grad():
        assert fused(torch.arange(5)[None]).grad_fn is None


def test_other_models_are_left_to_transformers():
    assert FusedDecoder.supports(make_body())
    assert not FusedDecoder.supports(make_body(attention_bias=True))
    assert not FusedDecoder.supports(make_body(mlp_bias=True))
    assert not FusedDecoder.supports(make_body(hidden_act="gelu"))
    qwen = Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    assert not FusedDecoder.supports(Qwen2Model(qwen))


def test_long_sequences_are_left_to_the_kernel_that_recomputes():
    fused = FusedDecoder(make_body())
    assert fused.fits(torch.zeros(1, 1024, dtype=torch.long))
    assert not fused.fits(torch.zeros(1, 1025, dtype=torch.long))
    assert not fused.fits(torch.zeros(5, 512, dtype=torch.long))
