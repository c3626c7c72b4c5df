"""The prompt of a session's next turn: exactly the tokens seen and sampled before, then the new.

A chat client sends its whole history as text. Templated and tokenised again, an earlier answer
need not become the tokens that were sampled (an answer cut in the middle of a word never does),
and the learner would train on tokens that the model never saw. So the turn that a request goes
on from is looked for among the session's stored rollouts, and only what the template writes
after that answer is tokenised. vLLM's chat path takes such ids by itself: `kv_transfer_params`
`prompt_token_ids`, made for engines that share one request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from online_sao.errors import StoreError
from online_sao.store import RolloutStore
from online_sao.store.models import clean_text
from online_sao.types import IntArray, Rollout

log = logging.getLogger(__name__)

# Fields of a request that change how its messages become a prompt. A turn with one of them is
# templated by vLLM alone and begins a trajectory of its own.
REWRITING_FIELDS = (
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "continue_final_message",
    "echo",
    "kv_transfer_params",
    "truncate_prompt_tokens",
)
FIELD_REASON = "request:"

Render = Callable[[Sequence[Mapping[str, Any]]], Awaitable[str]]
"""Messages to the text that the chat template makes of them, generation prompt included."""


class SessionPrompts:
    """Builds prompts from the store: nothing of a session is held in memory."""

    def __init__(self, store: RolloutStore, tokenizer: Any, match_turns: int) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._match_turns = match_turns

    async def continuation(
        self, session_id: str, body: Mapping[str, Any], render: Render
    ) -> tuple[str | None, list[int] | None, str | None]:
        """(id of the turn gone on from, prompt ids, why there is none).

        All three are None for a session's first turn, whose prompt is vLLM's own.
        """
        try:
            turns = await asyncio.to_thread(
                self._store.session_turns, session_id, self._match_turns
            )
        except StoreError as error:
            log.warning("the turns of a session cannot be read: %s", error)
            return None, None, "store_unavailable"
        field = rewriting_field(body)
        if field is not None:
            return None, None, FIELD_REASON + field
        if not turns:
            return None, None, None
        messages = body.get("messages")
        parent = find_parent(messages if isinstance(messages, list) else [], turns)
        if parent is None:
            return None, None, "history_changed"
        assert isinstance(messages, list)
        assert parent.messages is not None
        try:
            observation = await observation_text(messages, len(parent.messages), render)
            if observation is None:
                return None, None, "template_rewrites_history"
            # Deleted between the two reads: there are no ids to go on from.
            parent = await asyncio.to_thread(self._store.get, parent.id)
        except StoreError:
            return None, None, "store_unavailable"
        except Exception as error:  # the template's; vLLM's own rendering says what is wrong
            log.warning("a session's history cannot be templated: %s", error)
            return None, None, "template_error"
        if len(parent.token_ids) == 0:
            return None, None, "history_changed"
        return parent.id, self._prompt(parent, observation), None

    def _prompt(self, parent: Rollout, observation: str) -> list[int]:
        end = end_text(parent.token_ids, self._tokenizer)
        if end is not None:  # sampled already
            observation = observation.removeprefix(end)
        new = self._tokenizer(observation, add_special_tokens=False)["input_ids"]
        return [*parent.prompt_token_ids.tolist(), *parent.token_ids.tolist(), *new]


def rewriting_field(body: Mapping[str, Any]) -> str | None:
    for name in REWRITING_FIELDS:
        if body.get(name):
            return name
    return "add_generation_prompt" if body.get("add_generation_prompt") is False else None


def find_parent(messages: Sequence[Any], turns: Sequence[Rollout]) -> Rollout | None:
    """The turn of the longest history whose messages and answer `messages` begin with."""
    sent = [_comparable(message) for message in messages]
    found: Rollout | None = None
    for turn in turns:
        if turn.messages is None or (turn.new_trajectory or "").startswith(FIELD_REASON):
            continue
        length = len(turn.messages)
        if length >= len(sent) or (found is not None and length <= len(found.messages or ())):
            continue
        if sent[:length] != [_comparable(message) for message in turn.messages]:
            continue
        answer = sent[length]
        # The store replaces what no database keeps, so compare what it would have kept.
        if answer is not None and answer.keys() == {"role", "content"}:
            text = answer["content"]
            if answer["role"] == "assistant" and isinstance(text, str):
                found = turn if clean_text(text) == turn.answer else found
    return found


async def observation_text(messages: Sequence[Any], answer: int, render: Render) -> str | None:
    """What the template writes after the content of `messages[answer]`; None if it writes
    anything before it that it did not write when that answer was asked for."""
    mark = f"\ue000{secrets.token_hex(16)}\ue001"
    marked = [*messages[:answer], {"role": "assistant", "content": mark}, *messages[answer + 1 :]]
    before, found, after = (await render(marked)).partition(mark)
    if not found or mark in after:
        return None
    return after if before == await render(messages[:answer]) else None


def end_text(token_ids: IntArray, tokenizer: Any) -> str | None:
    """The text of the special token that an answer ends with; None if it was cut before it."""
    last = int(token_ids[-1])
    if last not in tokenizer.all_special_ids:
        return None
    return str(tokenizer.convert_ids_to_tokens(last))


def _comparable(message: Any) -> dict[str, Any] | None:
    """A message without the ways in which clients write the same one differently."""
    if not isinstance(message, Mapping):
        return None
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        content = "\n".join(str(part.get("text", "")) for part in content)
    kept = {key: value for key, value in message.items() if value is not None and value != []}
    return kept | ({"content": content} if content is not None else {})
