"""The embedded judge as a provider that litellm knows by the name `offline`.

`offline/archetypes` marks by rules and, where its package is installed, a small embedding
model; `offline/rules` by rules alone. The inputs come out of the same messages that any
other judge gets, and the reply is the same JSON.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from judge.embedded import EmbeddedJudge
from judge.preferences import PreferenceSet
from judge.rubric import read_messages

PROVIDER = "offline"
MODELS = ("archetypes", "rules")

_judges: dict[tuple[str, str], EmbeddedJudge] = {}


def register(preferences: PreferenceSet, model: str) -> EmbeddedJudge:
    """Make a set of styles known to the provider; the messages name it by fingerprint."""
    key = (model, preferences.fingerprint)
    if key not in _judges:
        _judges[key] = EmbeddedJudge(preferences, second_stage=model == "archetypes")
    _register_provider()
    return _judges[key]


def reply(model: str, messages: list[dict[str, Any]]) -> str:
    """The embedded judge's answer to a grading request, as text."""
    task, nonce = read_messages(messages)
    judge = _judges[model.rpartition("/")[2], task.fingerprint]
    turns = [text for _, text in task.conversation]
    request = next((text for role, text in reversed(task.conversation) if role == "user"), "")
    opinion = judge.mark([*turns, request], task.answer, task.style, task.pool)
    return json.dumps(
        {
            "code": nonce,
            "quality_reason": opinion.quality_reason,
            "quality": opinion.quality,
            "style_reason": opinion.style_reason,
            "detected_style": opinion.detected_style,
            "style": opinion.style,
        },
        ensure_ascii=False,
    )


def _register_provider() -> None:
    import litellm
    from litellm.llms.custom_llm import CustomLLM

    if any(item["provider"] == PROVIDER for item in litellm.custom_provider_map):
        return

    class OfflineProvider(CustomLLM):
        def completion(self, *args: Any, **kwargs: Any) -> Any:
            text = reply(kwargs["model"], kwargs["messages"])
            return _fill(kwargs["model_response"], kwargs["model"], text)

        async def acompletion(self, *args: Any, **kwargs: Any) -> Any:
            text = await asyncio.to_thread(reply, kwargs["model"], kwargs["messages"])
            return _fill(kwargs["model_response"], kwargs["model"], text)

    def _fill(response: Any, model: str, text: str) -> Any:
        response.model = model
        response.choices[0].message.content = text
        response.choices[0].finish_reason = "stop"
        return response

    litellm.custom_provider_map = [
        *litellm.custom_provider_map,
        {"provider": PROVIDER, "custom_handler": OfflineProvider()},
    ]
    from litellm.utils import custom_llm_setup

    custom_llm_setup()
