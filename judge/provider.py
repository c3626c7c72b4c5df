"""litellm: imported late, asked once, its errors put into a few words."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from types import ModuleType
from typing import Any

from judge.verdict import JudgeError

CLOSED_PROVIDERS = frozenset(
    {"openai", "anthropic", "zai", "gemini", "deepseek", "mistral", "xai", "cohere", "moonshot"}
)
"""Providers with a fixed list of models of their own: a name that is not in litellm's list
is most likely a typing error. Others serve whatever their users put there."""


def load_litellm() -> ModuleType:
    """litellm, without its download of a price list and its advice on stdout."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def check_model(model: str, api_base: str | None, api_key: str | None) -> None:
    """JudgeError unless litellm can be expected to reach `model` with these settings."""
    litellm = load_litellm()
    try:
        name, provider, found_key, _ = litellm.get_llm_provider(
            model, api_base=api_base, api_key=api_key
        )
    except Exception:
        raise JudgeError(
            f"litellm does not know the judge model '{model}'. Write it as provider/model, for "
            "example zai/glm-4.7, openai/NAME with an api_base for a server of your own, or "
            "offline/archetypes."
        ) from None
    listed = litellm.models_by_provider.get(provider) or ()
    if (
        api_base is None
        and provider in CLOSED_PROVIDERS
        and model not in listed
        and name not in listed
        and model not in litellm.model_cost
    ):
        near = difflib.get_close_matches(model, [*listed, *(f"{provider}/{m}" for m in listed)], 3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise JudgeError(
            f"litellm's list for {provider} has no judge model '{name}'.{hint} For a model "
            "newer than the installed litellm, set api_base to the provider's address."
        )
    if api_base is None and not api_key:
        missing = _missing_keys(litellm, model, provider, found_key)
        if missing:
            raise JudgeError(
                f"The judge model '{model}' needs a key: set the environment variable "
                f"{' or '.join(missing)}."
            )


def _missing_keys(
    litellm: ModuleType, model: str, provider: str, found_key: str | None
) -> list[str]:
    missing = list(litellm.validate_environment(model).get("missing_keys") or [])
    if not missing and not found_key and provider == "zai" and not os.environ.get("ZAI_API_KEY"):
        # validate_environment has no entry for this provider and calls everything present.
        missing = ["ZAI_API_KEY"]
    if provider.startswith("ollama"):  # asks for an address, which has a default
        missing = []
    return missing


def placeholder_key(model: str, api_base: str | None, api_key: str | None) -> str | None:
    """A server of one's own often has no key, but the client library insists on one."""
    if api_key or api_base is None:
        return api_key
    litellm = load_litellm()
    missing = litellm.validate_environment(model).get("missing_keys")
    return "none" if missing else None


def response_format(model: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """The strictest form of JSON output that litellm says the model takes."""
    litellm = load_litellm()
    if "response_format" not in supported_params(model):
        return None
    if litellm.supports_response_schema(model=model):
        return {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "schema": schema, "strict": True},
        }
    return {"type": "json_object"}


def supported_params(model: str) -> frozenset[str]:
    litellm = load_litellm()
    return frozenset(litellm.get_supported_openai_params(model=model) or ())


@dataclass(frozen=True)
class Fault:
    """What went wrong in one call."""

    reason: str
    detail: str
    retry: bool
    retry_after_s: float | None = None
    is_outage: bool = True
    """Counts towards opening the circuit."""


def fault_of(error: BaseException) -> Fault:
    """Any exception of a litellm call, in our words."""
    litellm = load_litellm()
    detail = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, TimeoutError | litellm.Timeout):
        return Fault("timeout", detail, retry=True)
    if isinstance(error, litellm.RateLimitError):
        return Fault("rate_limited", detail, retry=True, retry_after_s=retry_after_s(error))
    if isinstance(error, litellm.AuthenticationError | litellm.PermissionDeniedError):
        return Fault("no_key", detail, retry=False)
    if isinstance(error, litellm.NotFoundError):
        return Fault("bad_request", detail, retry=False)
    if isinstance(error, litellm.BadRequestError):
        return Fault("bad_request", detail, retry=False, is_outage=False)
    if _is_connection(error):
        return Fault("connection", detail, retry=True)
    return Fault("provider_error", detail, retry=True, retry_after_s=retry_after_s(error))


def _is_connection(error: BaseException) -> bool:
    """Whether the connection broke or was never made, however litellm wraps it."""
    import httpx
    import openai

    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            break
        if isinstance(seen, httpx.TransportError | ConnectionError):
            return True
        if isinstance(seen, openai.APIConnectionError):
            return True
        seen = seen.__cause__ or seen.__context__
    return "connection error" in str(error).lower()


def retry_after_s(error: BaseException) -> float | None:
    """The server's Retry-After in seconds, given as seconds or as a date."""
    sources = (
        getattr(error, "litellm_response_headers", None),
        getattr(getattr(error, "response", None), "headers", None),
        getattr(error, "headers", None),
    )
    for headers in sources:
        if not headers:
            continue
        value = headers.get("retry-after") or headers.get("Retry-After")
        if not value:
            continue
        try:
            return max(0.0, float(value))
        except ValueError:
            pass
        try:
            return max(0.0, parsedate_to_datetime(str(value)).timestamp() - time())
        except (TypeError, ValueError):
            continue
    return None
