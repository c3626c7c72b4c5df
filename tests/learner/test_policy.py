"""Log-probs and weights of the policy, against transformers used plainly."""

from dataclasses import replace

import pytest
import torch
from learning import (
    ANSWER,
    PROMPT,
    changed,
    everything,
    kept_states,
    make_learner,
    make_rollout,
    next_turn,
    save_model,
    settings,
)
from transformers import AutoModelForCausalLM

from online_sao.errors import ModelError
from online_sao.learner.batch import make_batch
from online_sao.learner.policy import Policy, action_logprobs, load_causal_lm

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    return Policy(str(tiny_model), settings(), CPU)


@pytest.fixture(scope="module")
def plain(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def plain_logprobs(model, rollout):
    """log pi of a rollout's tokens, one sequence at a time and nothing saved."""
    ids = torch.tensor([[*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0]
    start = len(rollout.prompt_token_ids)
    rows = [
        (logits[t - 1] / rollout.temperature).log_softmax(-1)[ids[0, t]]
        for t in range(start, ids.shape[1])
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_transformers_at_the_temperature(policy, plain, temperature):
    rollout = make_rollout(temperature=temperature)
    logprobs = policy.logprobs(make_batch([[rollout]]))
    n = len(PROMPT)
    torch.testing.assert_close(logprobs[0, n:], plain_logprobs(plain, rollout), rtol=0, atol=1e-5)
    assert torch.equal(logprobs[0, :n], torch.zeros(n))


def test_logprobs_in_a_padded_batch_with_a_session(policy, plain):
    first = make_rollout("t0", prompt=[9, 8, 7], tokens=[30, 31], temperature=0.7)
    second = next_turn(first, "t1", [11, 12, 13, 14], [32, 2, 99], temperature=1.3)
    single = make_rollout("s")
    batch = make_batch([[single], [first, second]])
    found = dict(batch.per_rollout(policy.logprobs(batch)))
    for rollout in (single, first, second):  # the later turn's prompt holds the earlier one
        torch.testing.assert_close(
            torch.from_numpy(found[rollout.id]),
            plain_logprobs(plain, rollout),
            rtol=0,
            atol=1e-5,
            msg=rollout.id,
        )


def test_padding_tokens_and_the_future_do_not_matter(policy):
    batch = make_batch([[make_rollout()], [make_rollout(tokens=[5] * 20)]])
    other = replace(batch, token_ids=batch.token_ids.clone())
    other.token_ids[0, len(PROMPT) + len(ANSWER) :] = 77
    assert not torch.equal(batch.token_ids, other.token_ids)
    assert torch.equal(policy.logprobs(batch), policy.logprobs(other))
    # a changed last token changes no log-prob but its own
    other.token_ids[0, len(PROMPT) + len(ANSWER) - 1] = 78
    gap = (policy.logprobs(batch) - policy.logprobs(other))[0].abs()
    assert gap.nonzero().flatten().tolist() == [len(PROMPT) + len(ANSWER) - 1]


def test_logits_are_float32_even_when_the_model_is_not(tiny_model, policy):
    rough = Policy(str(tiny_model), settings(compute_dtype="bfloat16"), CPU)
    batch = make_batch([[make_rollout()]])
    logits = rough.action_logits(batch)
    assert logits.dtype == torch.float32
    assert logits.shape == (len(ANSWER), 512)
    exact = policy.action_logits(batch)
    assert 0 < (logits - exact).abs().max() < 0.1
    # bfloat16 rounds the logits, the log-softmax is taken in float32: it sums to one
    torch.testing.assert_close(
        logits.log_softmax(-1).exp().sum(-1), torch.ones(len(ANSWER)), rtol=0, atol=1e-5
    )


def test_hidden_states_at_all_other_positions_get_exactly_zero_gradient(policy):
    first = make_rollout("t0", prompt=[9, 8, 7], tokens=[30, 31])
    second = next_turn(first, "t1", [11, 12, 13], [32, 2])
    batch = make_batch([[first, second], [make_rollout(prompt=[4, 5], tokens=[6])]])
    with kept_states(policy.model.base_model) as kept:
        logprobs = action_logprobs(policy.action_logits(batch), batch)
    logprobs.sum().backward()
    policy.model.zero_grad()
    size = kept[0].grad.abs().sum(-1)
    # actions at columns 3, 4, 8, 9 of row 0 and column 2 of row 1; one before each
    assert size.nonzero().tolist() == [[0, 2], [0, 3], [0, 7], [0, 8], [1, 1]]


def test_the_start_policy_stays(tiny_model):
    learner = make_learner(tiny_model)
    batch = make_batch([[make_rollout()]])
    at_start = learner.policy.start_logits(batch)
    assert torch.equal(at_start, learner.policy.action_logits(batch))
    for _ in range(3):
        assert learner.update([[make_rollout()]]).applied
    assert torch.equal(learner.policy.start_logits(batch), at_start)
    assert not torch.equal(learner.policy.action_logits(batch), at_start)


@pytest.mark.parametrize(
    ("coefficients", "kept"),
    [
        ({"kl_coef": 0.2, "start_decay": 0.0}, True),
        ({"kl_coef": 0.0, "start_decay": 0.2}, True),
        ({"kl_coef": 0.0, "start_decay": 0.0}, False),
    ],
)
def test_the_start_policy_is_kept_only_if_something_leads_back(tiny_model, coefficients, kept):
    policy = Policy(str(tiny_model), settings(**coefficients), CPU)
    names = set(policy.parameters.masters())
    assert set(policy.start_weights) == (names if kept else set())


def test_every_parameter_is_trained_and_tied_ones_once(tiny_model):
    learner = make_learner(tiny_model)
    assert learner.policy.model.config.tie_word_embeddings
    names = set(learner.policy.parameters.masters())
    assert names == {name for name, _ in learner.policy.model.named_parameters()}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    before = everything(learner)
    learner.update([[make_rollout()]])
    moved = changed(before, everything(learner))
    assert {f"policy.{name}" for name in names} <= moved
    # the head is the embedding, still
    assert learner.policy.model.lm_head.weight is learner.policy.model.model.embed_tokens.weight


def test_weights_load_into_a_plain_model_under_their_names(tiny_model, plain):
    learner = make_learner(tiny_model)
    learner.update([[make_rollout()]])
    weights = learner.policy.weights(torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    left_over = model.load_state_dict(weights, strict=False)
    assert left_over.unexpected_keys == []
    assert left_over.missing_keys == ["lm_head.weight"]  # tied
    rollout = make_rollout()
    found = learner.policy.logprobs(make_batch([[rollout]]))[0, len(PROMPT) :]
    torch.testing.assert_close(found, plain_logprobs(model, rollout), rtol=0, atol=1e-5)
    assert (found - plain_logprobs(plain, rollout)).abs().max() > 1e-3


def test_weights_come_in_the_asked_dtype_on_the_cpu(policy):
    for dtype in (torch.bfloat16, torch.float32):
        weights = policy.weights(dtype)
        assert {tensor.dtype for tensor in weights.values()} == {dtype}
        assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
        assert not any(tensor.requires_grad for tensor in weights.values())


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_model_whose_logits_are_more_than_its_head_is_refused(tmp_path, name):
    folder = save_model(name, tmp_path / name)
    with pytest.raises(ModelError, match="does more to its logits than its head"):
        Policy(str(folder), settings(), CPU)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_logits_are_its_heads_output_is_taken(tmp_path, name, dtype):
    folder = save_model(name, tmp_path / name)
    policy = Policy(str(folder), settings(compute_dtype=dtype), CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=policy.model.dtype).eval()
    rollout = make_rollout()
    torch.testing.assert_close(
        policy.logprobs(make_batch([[rollout]]))[0, len(PROMPT) :],
        plain_logprobs(plain, rollout).float(),
        rtol=0,
        atol=1e-5 if dtype == "float32" else 0.05,
    )


class TestLoading:
    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(ModelError, match=r"The model .*nowhere cannot be loaded: "):
            load_causal_lm(str(tmp_path / "nowhere"), torch.float32, CPU)

    def test_a_name_that_no_hub_knows(self):
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_causal_lm("nobody/no-such-model", torch.float32, CPU)

    def test_weights_cut_short(self, tmp_path, tiny_model):
        for file in tiny_model.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        with pytest.raises(ModelError, match="cannot be loaded") as error:
            load_causal_lm(str(tmp_path), torch.float32, CPU)
        assert len(str(error.value).splitlines()) == 1

    def test_a_config_of_no_known_kind(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
        with pytest.raises(ModelError, match="abacus"):
            load_causal_lm(str(tmp_path), torch.float32, CPU)

    def test_a_loaded_model_is_in_evaluation_mode(self, tiny_model):
        model = load_causal_lm(str(tiny_model), torch.bfloat16, CPU)
        assert not any(module.training for module in model.modules())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
