"""Prompts of later turns, from a real store and tokenizer; the template is transformers' own.

What vLLM does with them is seen in test_endpoint_sessions.py.
"""

import numpy as np
import pytest

from online_sao.service.sessions import SessionPrompts, find_parent, observation_text
from online_sao.store import RolloutStore
from online_sao.types import Rollout, WeightSpan

USER = {"role": "user", "content": "Write about rain."}
MORE = {"role": "user", "content": "Go on."}
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def store(tmp_path):
    with RolloutStore(f"sqlite:///{tmp_path}/store.sqlite") as made:
        yield made


@pytest.fixture
def render(tokenizer):
    async def render(messages):
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )

    return render


@pytest.fixture
def prompts(store, tokenizer):
    return SessionPrompts(store, tokenizer, match_turns=64)


def record(store, tokenizer, name, messages, ids, prompt_ids=None, **fields):
    """An answer of exactly `ids`, as the engine records it."""
    if prompt_ids is None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    fields = {"session_id": "s"} | fields
    return store.add(
        Rollout(
            id=name,
            response_id=name,
            choice=0,
            prompt_token_ids=np.array(prompt_ids, np.int32),
            token_ids=np.array(ids, np.int32),
            behavior_logprobs=np.full(len(ids), -1.0, np.float32),
            weight_spans=(WeightSpan(0, 0, len(ids)),),
            temperature=1.0,
            messages=messages,
            answer=tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop",
            **fields,
        )
    )


def cut_word(tokenizer):
    """Ids of an answer that ends in the middle of a word, which no tokenizer would cut so."""
    (whole,) = tokenizer(" rain", add_special_tokens=False)["input_ids"][:1]
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "rai"]
    assert tokenizer(tokenizer.decode(letters), add_special_tokens=False)["input_ids"] != letters
    return [whole, *letters]


class TestPrompt:
    async def test_c04_a_cut_answer_is_history_with_exactly_its_sampled_ids(
        self, store, tokenizer, prompts, render
    ):
        ids = cut_word(tokenizer)
        first = record(store, tokenizer, "a", [USER], ids)
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        parent, prompt, reason = await prompts.continuation("s", {"messages": history}, render)
        assert (parent, reason) == ("a", None)
        seen = [*first.prompt_token_ids.tolist(), *ids]
        assert prompt[: len(seen)] == seen
        new = tokenizer.decode(prompt[len(seen) :])
        assert new == f"{END}\n<|im_start|>user\nGo on.{END}\n<|im_start|>assistant\n"
        # templated and tokenised anew, the history would be other tokens
        again = tokenizer(await render(history), add_special_tokens=False)["input_ids"]
        assert again != prompt

    async def test_an_end_that_was_sampled_is_not_written_twice(
        self, store, tokenizer, prompts, render
    ):
        first = record(store, tokenizer, "a", [USER], [40, 41, tokenizer.eos_token_id])
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        _, prompt, _ = await prompts.continuation("s", {"messages": history}, render)
        seen = len(first.prompt_token_ids) + 3
        assert tokenizer.decode(prompt[seen:]).startswith("\n<|im_start|>user")

    async def test_a_third_turn_holds_the_ids_of_both_before_it(
        self, store, tokenizer, prompts, render
    ):
        first = record(store, tokenizer, "a", [USER], cut_word(tokenizer))
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        _, prompt, _ = await prompts.continuation("s", {"messages": history}, render)
        second = record(store, tokenizer, "b", history, cut_word(tokenizer), prompt, parent_id="a")
        history = [*history, {"role": "assistant", "content": second.answer}, MORE]
        parent, third, _ = await prompts.continuation("s", {"messages": history}, render)
        assert parent == "b"
        seen = [*prompt, *cut_word(tokenizer)]
        assert third[: len(seen)] == seen

    async def test_the_first_turn_is_left_to_the_engine(self, prompts, render):
        assert await prompts.continuation("s", {"messages": [USER]}, render) == (None, None, None)

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ({"messages": [USER, {"role": "assistant", "content": "x"}, MORE]}, "history_changed"),
            ({"messages": [MORE]}, "history_changed"),
            ({"messages": "no list"}, "history_changed"),
            ({"tools": [{"type": "function"}]}, "request:tools"),
            ({"chat_template_kwargs": {"x": 1}}, "request:chat_template_kwargs"),
            ({"add_generation_prompt": False}, "request:add_generation_prompt"),
        ],
    )
    async def test_why_a_trajectory_begins(self, store, tokenizer, prompts, render, body, reason):
        first = record(store, tokenizer, "a", [USER], [40, 41])
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        found = await prompts.continuation("s", {"messages": history} | body, render)
        assert found == (None, None, reason)

    async def test_a_template_that_rewrites_the_history(self, store, tokenizer, prompts, render):
        """Some models' templates take the reasoning out of earlier answers."""

        async def forgetful(messages):
            text = await render(messages)
            return text.replace("rain", "sun") if len(messages) > 1 else text

        first = record(store, tokenizer, "a", [USER], [40, 41])
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        found = await prompts.continuation("s", {"messages": history}, forgetful)
        assert found == (None, None, "template_rewrites_history")

    async def test_a_template_that_fails_is_left_to_the_engine_to_report(
        self, store, tokenizer, prompts
    ):
        async def fails(_):
            raise ValueError("no such role")

        first = record(store, tokenizer, "a", [USER], [40, 41])
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        found = await prompts.continuation("s", {"messages": history}, fails)
        assert found == (None, None, "template_error")

    async def test_a_deleted_turn_is_no_history(self, store, tokenizer, prompts, render):
        first = record(store, tokenizer, "a", [USER], [40, 41])
        record(store, tokenizer, "b", [MORE], [42])
        store.delete_text("a")
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        found = await prompts.continuation("s", {"messages": history}, render)
        assert found == (None, None, "history_changed")

    async def test_only_the_last_turns_are_looked_at(self, store, tokenizer, render):
        first = record(store, tokenizer, "a", [USER], [40, 41])
        record(store, tokenizer, "b", [MORE], [42])
        history = [USER, {"role": "assistant", "content": first.answer}, MORE]
        for turns, expected in ((2, ("a", None)), (1, (None, "history_changed"))):
            prompts = SessionPrompts(store, tokenizer, match_turns=turns)
            parent, _, reason = await prompts.continuation("s", {"messages": history}, render)
            assert (parent, reason) == expected

    async def test_a_store_that_does_not_answer(self, store, tokenizer, prompts, render):
        record(store, tokenizer, "a", [USER], [40])
        with store._engine.begin() as conn:
            conn.exec_driver_sql("ALTER TABLE rollouts RENAME TO gone")
        found = await prompts.continuation("s", {"messages": [USER]}, render)
        assert found == (None, None, "store_unavailable")


class TestFindParent:
    def turn(self, store, tokenizer, name, messages, ids=(40, 41), **fields):
        return record(store, tokenizer, name, messages, list(ids), **fields)

    def test_the_longest_history_wins(self, store, tokenizer):
        a = self.turn(store, tokenizer, "a", [USER])
        said = {"role": "assistant", "content": a.answer}
        b = self.turn(store, tokenizer, "b", [USER, said, MORE])
        history = [USER, said, MORE, {"role": "assistant", "content": b.answer}, MORE]
        for turns in ([a, b], [b, a]):
            assert find_parent(history, turns).id == "b"
        assert find_parent([USER, said, USER], [a, b]).id == "a"

    def test_of_several_choices_the_one_that_was_taken(self, store, tokenizer):
        a = self.turn(store, tokenizer, "a", [USER], [40])
        b = self.turn(store, tokenizer, "b", [USER], [44])
        assert a.answer != b.answer
        history = [USER, {"role": "assistant", "content": b.answer}, MORE]
        assert find_parent(history, [a, b]).id == "b"

    @pytest.mark.parametrize(
        "written",
        [
            lambda text: {"role": "assistant", "content": text, "refusal": None, "tool_calls": []},
            lambda text: {"role": "assistant", "content": [{"type": "text", "text": text}]},
        ],
    )
    def test_clients_write_the_same_message_in_several_ways(self, store, tokenizer, written):
        a = self.turn(store, tokenizer, "a", [USER])
        assert find_parent([USER, written(a.answer), MORE], [a]).id == "a"

    def test_what_no_database_keeps_is_compared_as_it_was_kept(self, store, tokenizer):
        nul = tokenizer.convert_tokens_to_ids("\u0100")  # byte-level BPE's letter for NUL
        a = self.turn(store, tokenizer, "a", [USER], [nul])
        assert a.answer == "\0"
        kept = store.get("a")
        assert kept.answer == "\ufffd"
        history = [USER, {"role": "assistant", "content": "\0"}, MORE]
        assert find_parent(history, [kept]).id == "a"

    @pytest.mark.parametrize(
        "said",
        [
            {"role": "user", "content": "{}"},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": "{}", "tool_calls": [{"id": "1"}]},
            {"role": "assistant", "content": 5},
            "{}",
            None,
        ],
    )
    def test_what_is_not_the_answer(self, store, tokenizer, said):
        a = self.turn(store, tokenizer, "a", [USER])
        if isinstance(said, dict) and said.get("content") == "{}":
            said = said | {"content": a.answer}
        assert find_parent([USER, said, MORE], [a]) is None

    def test_a_turn_templated_in_another_way_is_not_gone_on_from(self, store, tokenizer):
        a = self.turn(store, tokenizer, "a", [USER], new_trajectory="request:tools")
        history = [USER, {"role": "assistant", "content": a.answer}, MORE]
        assert find_parent(history, [a]) is None


async def test_an_observation_is_what_the_template_writes_after_the_answer(render):
    history = [USER, {"role": "assistant", "content": "Drip."}, MORE]
    text = await observation_text(history, 1, render)
    assert text == f"{END}\n<|im_start|>user\nGo on.{END}\n<|im_start|>assistant\n"
