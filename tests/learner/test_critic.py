"""The critic: where its values stand, what it trains, and what it leaves alone."""

from dataclasses import replace

import pytest
import torch
from learning import (
    ANSWER,
    PROMPT,
    architecture,
    changed,
    everything,
    kept_states,
    make_learner,
    make_rollout,
    next_turn,
    save_model,
    settings,
)
from transformers import AutoModel

from online_sao.algorithm.objectives import value_loss
from online_sao.errors import ModelError
from online_sao.learner.batch import make_batch
from online_sao.learner.critic import Critic, mlp_parameter_names
from online_sao.learner.learner import Learner

CPU = torch.device("cpu")
DENSE = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
FUSED = {"experts.gate_up_proj", "experts.down_proj"}  # all experts of a layer in one tensor


@pytest.fixture
def critic(tiny_model) -> Critic:
    made = Critic(str(tiny_model), settings(), CPU)
    with torch.no_grad():
        made.head.weight.copy_(torch.randn(1, 64, generator=torch.Generator().manual_seed(3)))
        made.head.bias.fill_(0.25)
    return made


def session():
    first = make_rollout("t0", prompt=[9, 8, 7], tokens=[30, 31])
    return [first, next_turn(first, "t1", [11, 12, 13], [32, 2])]


def test_before_training_every_value_is_zero(tiny_model):
    values = Critic(str(tiny_model), settings(), CPU).values(make_batch([session()]))
    assert torch.equal(values, torch.zeros(1, 10))


def test_values_are_the_heads_output_one_token_earlier(critic, tiny_model):
    plain = AutoModel.from_pretrained(tiny_model, dtype=torch.float32).eval()
    batch = make_batch([[make_rollout()], session()])
    values = critic.values(batch)
    assert values.dtype == torch.float32
    for row, length in ((0, 12), (1, 10)):
        with torch.no_grad():
            states = plain(batch.token_ids[row : row + 1, :length]).last_hidden_state[0]
            outputs = states @ critic.head.weight[0] + critic.head.bias
        for t in range(12):
            wanted = outputs[t - 1] if batch.action_mask[row, t] else torch.tensor(0.0)
            torch.testing.assert_close(values[row, t], wanted, rtol=0, atol=2e-5)


def test_a_value_does_not_see_its_own_token(critic):
    batch = make_batch([session()])
    other = replace(batch, token_ids=batch.token_ids.clone())
    other.token_ids[0, -1] = 400  # the last action token: no state holds it
    assert torch.equal(critic.values(batch), critic.values(other))
    other.token_ids[0, 5] = 400  # an observation before the second action
    gap = (critic.values(batch) - critic.values(other))[0].detach().abs()
    assert gap.nonzero().flatten().tolist() == [8, 9]


def test_padding_does_not_matter(critic):
    batch = make_batch([[make_rollout()], [make_rollout(tokens=[5] * 20)]])
    other = replace(batch, token_ids=batch.token_ids.clone())
    other.token_ids[0, len(PROMPT) + len(ANSWER) :] = 77
    assert torch.equal(critic.values(batch), critic.values(other))


def test_outputs_at_all_other_positions_get_exactly_zero_gradient(critic):
    batch = make_batch([session(), [make_rollout(prompt=[4, 5], tokens=[6])]])
    with kept_states(critic.backbone) as kept:
        values = critic.values(batch)
    loss, _ = value_loss(values, torch.ones_like(values), batch.action_mask)
    loss.backward()
    size = kept[0].grad.abs().sum(-1)
    # actions at columns 3, 4, 8, 9 of row 0 and column 2 of row 1; one before each
    assert size.nonzero().tolist() == [[0, 2], [0, 3], [0, 7], [0, 8], [1, 1]]


def test_the_head_is_float32_under_a_bfloat16_body(tiny_model):
    critic = Critic(str(tiny_model), settings(compute_dtype="bfloat16"), CPU)
    assert critic.head.weight.dtype == torch.float32
    assert {p.dtype for p in critic.backbone.parameters()} == {torch.bfloat16}
    assert critic.values(make_batch([[make_rollout()]])).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "layers", "trained"),
    [
        ("llama", "layers", {f"mlp.{part}" for part in DENSE}),
        ("qwen2", "layers", {f"mlp.{part}" for part in DENSE}),
        ("qwen3", "layers", {f"mlp.{part}" for part in DENSE}),
        ("mixtral", "layers", {f"mlp.{part}" for part in FUSED}),
        ("qwen3_moe", "layers", {f"mlp.{part}" for part in FUSED}),
        (
            "qwen2_moe",
            "layers",
            {f"mlp.{part}" for part in FUSED} | {f"mlp.shared_expert.{part}" for part in DENSE},
        ),
        (
            "gpt2",
            "h",
            {f"mlp.{part}.{kind}" for part in ("c_fc", "c_proj") for kind in ("weight", "bias")},
        ),
    ],
)
def test_roles_by_name(name, layers, trained):
    with torch.device("meta"):
        backbone = AutoModel.from_config(architecture(name))
    wanted = {f"{layers}.{layer}.{part}" for layer in (0, 1) for part in trained}
    assert mlp_parameter_names(backbone) == wanted


@pytest.mark.parametrize("name", ["opt", "mamba"])
def test_roles_that_cannot_be_told_apart_are_an_error(name):
    with torch.device("meta"):
        backbone = AutoModel.from_config(architecture(name))
    with pytest.raises(ModelError, match=r'set learner.critic_trainable = "all"'):
        mlp_parameter_names(backbone)


def test_a_layer_without_attention_is_an_error():
    layer = torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    with pytest.raises(ModelError, match="no MLP or no attention"):
        mlp_parameter_names(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}))


def test_weights_of_an_unknown_kind_are_an_error():
    linear = torch.nn.Linear
    layer = {"mlp": linear(2, 2), "self_attn": linear(2, 2), "adapter": linear(2, 2)}
    layers = torch.nn.ModuleList([torch.nn.ModuleDict(layer)])
    with pytest.raises(ModelError, match=r"cannot tell what layers\.0\.adapter\.weight does"):
        mlp_parameter_names(torch.nn.ModuleDict({"layers": layers}))


def test_a_model_without_layers_is_an_error():
    with pytest.raises(ModelError, match="no MLP or no attention"):
        mlp_parameter_names(torch.nn.Linear(2, 2))


class TestUpdate:
    def moved(self, model, **changes):
        """Names in the critic that two updates change, and all of its names."""
        learner = make_learner(model, kl_coef=0.0, weight_decay=0.1, **changes)
        before = everything(learner)
        for _ in range(2):
            assert learner.update([[make_rollout()]]).applied
        after = everything(learner)
        names = {name for name, _ in learner.critic.backbone.named_parameters()}
        moved = changed(before, after)
        return {name for name in names if f"critic_model.{name}" in moved}, names

    @pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
    def test_trains_projections_and_experts_only(self, tmp_path, name):
        # One step may leave an expert out that no token was sent to; fused, it shows all the same.
        moved, names = self.moved(save_model(name, tmp_path / "model"))
        wanted = {name for name in names if ".mlp." in name and ".gate." not in name}
        assert moved == wanted
        assert len(wanted) == (6 if name == "llama" else 4)

    def test_trains_everything_if_asked_to(self, tiny_model):
        moved, names = self.moved(tiny_model, critic_trainable="all")
        assert moved == names

    def test_the_head_is_trained(self, tiny_model):
        learner = make_learner(tiny_model)
        learner.update([[make_rollout()]])
        assert learner.critic.head.weight.abs().min() > 0
        assert learner.critic.head.bias.item() > 0

    def test_an_architecture_that_is_not_understood_is_refused_at_the_start(self, tmp_path):
        folder = str(save_model("opt", tmp_path / "opt"))
        with pytest.raises(ModelError, match=r'set learner.critic_trainable = "all"'):
            Learner(settings(), folder)
        learner = Learner(settings(critic_trainable="all"), folder)
        assert learner.update([[make_rollout()]]).applied
