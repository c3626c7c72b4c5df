"""The real vLLM engine with a tiny model: rollouts recorded, weights swapped in place.

The reference is transformers in float32 on the same weights.
"""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from online_sao.config import Config
from online_sao.engine.settings import engine_environment
from online_sao.engine.weight_file import WeightFile, write_weight_file
from online_sao.errors import WeightUpdateError
from online_sao.types import RolloutState

pytestmark = pytest.mark.engine

SHARED_PREFIX = "Write only in the style that you selected. " * 6
GAP = 2e-4  # nats per token; float32 against float32, other kernels


class Harness:
    """One engine on an event loop of its own, for the module."""

    def __init__(self, model: Path, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        overrides = {"model.name": str(model), "engine.dtype": "float32"}
        # Two threads: vLLM computes in a Worker process of its own. With one, as the service on
        # two cores, it does so in EngineCore, which the tests of the service are about.
        overrides |= {"engine.max_model_len": 256, "engine.threads": 2}
        self.config = Config.load(overrides=overrides)
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.rollouts = []
        self.loop = asyncio.new_event_loop()
        self.engine = self.loop.run_until_complete(self._build(model))
        self.count = 0

    async def _build(self, model):
        os.environ.update(engine_environment(self.config))
        from online_sao.service.engine import build_engine, parse_server_arguments, server_arguments

        args = parse_server_arguments(server_arguments(self.config, str(model)))
        engine = await build_engine(self.config, args)

        async def record(rollout):
            self.rollouts.append(rollout)
            return True

        engine.recorder = record
        return engine

    def ask(self, text="Rain.", max_tokens=24, body=None, **sampling):
        return self.loop.run_until_complete(self._ask(text, max_tokens, body or {}, sampling))

    async def _ask(self, text, max_tokens, body, sampling, on_output=lambda: None):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from online_sao.service.engine import CURRENT_REQUEST, RequestContext

        self.count += 1
        context = RequestContext(f"r{self.count}", {"messages": [], **body})
        CURRENT_REQUEST.set(context)
        params = SamplingParams(
            max_tokens=max_tokens, **{"output_kind": RequestOutputKind.DELTA, **sampling}
        )
        prompt = {"prompt_token_ids": self.tokenizer(SHARED_PREFIX + text)["input_ids"]}
        start = len(self.rollouts)
        async for _ in self.engine.generate(prompt, params, context.response_id):
            on_output()
        return self.rollouts[start:]

    def new_weights(self, version, scale=0.3):
        """Move the reference to other weights and write them as `version`."""
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter += torch.randn_like(parameter) * parameter.std() * scale
        tensors = {
            name: parameter.detach().clone().contiguous()
            for name, parameter in self.reference.named_parameters()
        }
        return write_weight_file(self.folder, version, tensors)

    def load(self, file):
        return self.loop.run_until_complete(self.engine.load_weights(file))

    def gap(self, rollout, span=None):
        """Largest difference to the reference's log-probs over the span's tokens, in nats."""
        ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])
        tokens = torch.tensor(ids)[None].long()
        with torch.no_grad():
            logits = self.reference(tokens).logits[0] / rollout.temperature
        start = len(rollout.prompt_token_ids)
        expected = logits.log_softmax(-1)[start - 1 : -1].gather(-1, tokens[0, start:, None])[:, 0]
        gaps = (expected - torch.tensor(rollout.behavior_logprobs)).abs()
        return float(gaps[slice(*span) if span else slice(None)].max())


@pytest.fixture(scope="module")
def harness(tiny_model, tmp_path_factory):
    made = Harness(tiny_model, tmp_path_factory.mktemp("weights"))
    yield made
    made.engine.shutdown()
    made.loop.close()


def test_behavior_logprobs_are_those_of_the_sampled_distribution(harness):
    (rollout,) = harness.ask(temperature=0.7)
    assert rollout.state is RolloutState.PENDING
    assert len(rollout.token_ids) == len(rollout.behavior_logprobs) > 0
    assert rollout.temperature == pytest.approx(0.7)
    assert harness.gap(rollout) < GAP


def test_an_answer_longer_than_an_update_takes_is_not_learned_from(harness):
    (rollout,) = harness.ask(max_tokens=4, seed=1)
    num_tokens = len(rollout.prompt_token_ids) + len(rollout.token_ids)
    assert harness.engine.max_train_tokens == harness.config.learner.max_train_tokens
    for limit, reason in ((num_tokens, None), (num_tokens - 1, "too_long")):
        harness.engine.max_train_tokens = limit
        try:
            (again,) = harness.ask(max_tokens=4, seed=1)  # the same answer
        finally:
            harness.engine.max_train_tokens = harness.config.learner.max_train_tokens
        assert list(again.token_ids) == list(rollout.token_ids)
        assert again.reason == reason


def test_all_output_kinds_record_the_same(harness):
    from vllm.sampling_params import RequestOutputKind

    by_kind = [
        harness.ask(seed=7, output_kind=kind)[0]
        for kind in (
            RequestOutputKind.DELTA,
            RequestOutputKind.CUMULATIVE,
            RequestOutputKind.FINAL_ONLY,
        )
    ]
    assert len({tuple(rollout.token_ids) for rollout in by_kind}) == 1
    assert len({rollout.answer for rollout in by_kind}) == 1
    assert all(len(r.behavior_logprobs) == len(r.token_ids) for r in by_kind)


def test_each_of_n_choices_is_a_rollout(harness):
    rollouts = harness.ask(n=3)
    assert sorted(rollout.choice for rollout in rollouts) == [0, 1, 2]
    assert len({rollout.id for rollout in rollouts}) == 3
    assert {rollout.response_id for rollout in rollouts} == {rollouts[0].response_id}
    assert max(harness.gap(rollout) for rollout in rollouts) < GAP


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_one_choice_that_is_not_recorded_is_said_of_the_answer(harness, monkeypatch, fails):
    from online_sao.service.engine import CURRENT_REQUEST

    record, said = harness.engine.recorder, []

    async def refuses_one(rollout):
        await record(rollout)
        said.append(CURRENT_REQUEST.get())
        return len(said) - 1 != fails

    monkeypatch.setattr(harness.engine, "recorder", refuses_one)
    harness.ask(n=3)
    assert len(said) == 3
    assert said[-1].recorded is False


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"top_p": 0.9}, "sampling:top_p"),
        ({"top_k": 20}, "sampling:top_k"),
        ({"min_p": 0.1}, "sampling:min_p"),
        ({"repetition_penalty": 1.2}, "sampling:repetition_penalty"),
        ({"min_tokens": 3}, "sampling:min_tokens"),
        ({"ignore_eos": True}, "sampling:ignore_eos"),
        ({"logit_bias": {5: 3.0}}, "sampling:logit_bias"),
        ({"temperature": 0.0}, "temperature_too_low"),
    ],
)
def test_c02_settings_off_the_allow_list_are_excluded(harness, sampling, reason):
    (rollout,) = harness.ask(**sampling)
    assert (rollout.state, rollout.reason) == (RolloutState.EXCLUDED, reason)


def test_allowed_settings_are_trained_on(harness):
    (rollout,) = harness.ask(seed=3, stop=["zzzz"], logprobs=2, temperature=1.3)
    assert rollout.state is RolloutState.PENDING
    assert harness.gap(rollout) < GAP


def test_after_a_publish_the_engine_agrees_with_transformers_on_the_new_weights(harness):
    for version in (1, 2, 3):  # more than once: the packed head must follow every time
        pause_s = harness.load(harness.new_weights(version))
        (rollout,) = harness.ask()
        assert rollout.weight_version_start == rollout.weight_version_end == version
        assert harness.gap(rollout) < GAP
        assert 0 < pause_s < 30


def test_c12_no_token_is_computed_on_a_prefix_cached_under_older_weights(harness):
    for version in range(4, 9):
        harness.ask(text="warm the cache")
        harness.load(harness.new_weights(version))
        (rollout,) = harness.ask(text="the same long prefix")
        assert rollout.weight_spans[0].version == version
        assert harness.gap(rollout) < GAP


def test_a_swap_in_the_middle_of_an_answer_splits_its_versions(harness):
    before = harness.engine.weight_version

    async def swap_meanwhile():
        begun = asyncio.Event()
        asking = asyncio.ensure_future(
            harness._ask("a long one", 160, {}, {"ignore_eos": True}, begun.set)
        )
        await asyncio.wait_for(begun.wait(), 60)  # before a token there is nothing to split
        await harness.engine.load_weights(harness.new_weights(before + 1))
        return await asking

    (rollout,) = harness.loop.run_until_complete(swap_meanwhile())
    first, second = rollout.weight_spans
    assert (first.version, second.version) == (before, before + 1)
    assert (first.start, first.end, second.end) == (0, second.start, len(rollout.token_ids))
    # Later tokens are those of the new weights given the whole text before them.
    assert harness.gap(rollout, (second.start, second.end)) < GAP


def test_a_corrupt_file_leaves_the_old_weights_serving(harness):
    version = harness.engine.weight_version
    (before,) = harness.ask(seed=11)
    kept = [p.detach().clone() for p in harness.reference.parameters()]
    file = harness.new_weights(version + 1)
    with open(file.path, "r+b") as stream:
        stream.seek(-100, 2)
        stream.write(b"\xff" * 50)
    with pytest.raises(WeightUpdateError, match="damaged"):
        harness.load(file)
    with torch.no_grad():
        for parameter, old in zip(harness.reference.parameters(), kept, strict=True):
            parameter.copy_(old)
    (after,) = harness.ask(seed=11)
    assert harness.engine.weight_version == version
    assert list(after.token_ids) == list(before.token_ids)
    assert harness.gap(after) < GAP


def test_a_file_of_another_model_is_refused_before_serving_stops(harness):
    other = write_weight_file(harness.folder, 1000, {"model.norm.weight": torch.ones(3)})
    with pytest.raises(WeightUpdateError, match="another model"):
        harness.load(other)
    assert not harness.loop.run_until_complete(harness.engine.is_paused())


@pytest.mark.parametrize("place", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_load_that_fails_in_the_middle_leaves_the_old_weights_serving(harness, place):
    version = harness.engine.weight_version
    (before,) = harness.ask(seed=12)
    tensors = {
        name: torch.full_like(parameter, 0.01)
        for name, parameter in harness.reference.named_parameters()
    }
    tensors[place] = torch.zeros(3, 3)  # parts before it load
    harness.engine._layout = None  # as if this were the first file
    with pytest.raises(WeightUpdateError, match="the old one is served"):
        harness.load(write_weight_file(harness.folder, version + 1, tensors))
    assert not harness.loop.run_until_complete(harness.engine.is_paused())
    (after,) = harness.ask(seed=12)
    assert after.weight_version_start == version
    assert list(after.token_ids) == list(before.token_ids)
    assert harness.gap(after) < GAP
    harness.load(harness.new_weights(version + 2))
    (rollout,) = harness.ask()
    assert rollout.weight_version_start == version + 2
    assert harness.gap(rollout) < GAP


def test_a_file_that_changes_while_it_is_read_leaves_the_old_weights_serving(harness, monkeypatch):
    version = harness.engine.weight_version
    kept = [p.detach().clone() for p in harness.reference.parameters()]
    checks = []

    def verify(file):
        checks.append(file.version)
        if len(checks) == 2:  # when all its parts are loaded
            raise WeightUpdateError("The weight file is damaged.")

    with monkeypatch.context() as patch:
        patch.setattr(WeightFile, "verify", verify)
        with pytest.raises(WeightUpdateError, match="the old one is served"):
            harness.load(harness.new_weights(version + 1))
    assert checks == [version + 1] * 2
    with torch.no_grad():
        for parameter, old in zip(harness.reference.parameters(), kept, strict=True):
            parameter.copy_(old)
    (after,) = harness.ask()
    assert after.weight_version_start == version
    assert harness.gap(after) < GAP
    harness.load(harness.new_weights(version + 2))  # and another can be loaded
    (rollout,) = harness.ask()
    assert rollout.weight_version_start == version + 2
    assert harness.gap(rollout) < GAP


def test_after_a_failed_exchange_nothing_is_generated_until_a_good_one(harness, monkeypatch):
    version = harness.engine.weight_version

    async def fail(weight_version):
        raise RuntimeError("lost the worker")

    with monkeypatch.context() as patch:
        patch.setattr(harness.engine, "finish_weight_update", fail)
        with pytest.raises(WeightUpdateError, match="stays paused"):
            harness.load(harness.new_weights(version + 1))
    assert harness.loop.run_until_complete(harness.engine.is_paused())
    assert harness.engine.weight_version == version
    harness.load(harness.new_weights(version + 2))
    assert not harness.loop.run_until_complete(harness.engine.is_paused())
    (rollout,) = harness.ask()
    assert rollout.weight_version_start == version + 2
    assert harness.gap(rollout) < GAP


def test_an_aborted_answer_is_recorded_and_never_trained_on(harness):
    async def leave():
        begun = asyncio.Event()
        asking = asyncio.ensure_future(
            harness._ask("leaving", 200, {}, {"ignore_eos": True}, begun.set)
        )
        await asyncio.wait_for(begun.wait(), 60)  # before a token there is nothing to record
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.1)

    start = len(harness.rollouts)
    harness.loop.run_until_complete(leave())
    (rollout,) = harness.rollouts[start:]
    assert (rollout.state, rollout.reason) == (RolloutState.EXCLUDED, "aborted")
    assert 0 < len(rollout.token_ids) < 200


def test_what_the_engine_itself_aborts_is_never_learned_from(harness):
    """As when it is told to end: the answer comes to its end as any other, only cut."""

    async def ask():
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from online_sao.service.engine import CURRENT_REQUEST, RequestContext

        context = RequestContext("cut", {"messages": []})
        CURRENT_REQUEST.set(context)
        params = SamplingParams(max_tokens=150, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": harness.tokenizer("Rain.")["input_ids"]}
        async for _ in harness.engine.generate(prompt, params, "cut"):
            await harness.engine.abort("cut")

    start = len(harness.rollouts)
    harness.loop.run_until_complete(asyncio.wait_for(ask(), 60))
    (rollout,) = harness.rollouts[start:]
    assert rollout.finish_reason == "abort"
    assert (rollout.state, rollout.reason) == (RolloutState.EXCLUDED, "aborted")
