"""The service's routes that the dashboard uses. No streamlit."""

from __future__ import annotations

from typing import Any

import httpx

from online_sao.errors import OnlineSAOError

HEALTH_TIMEOUT_S = 1.0  # asked at every refresh, so short
TIMEOUT_S = 60.0  # a rollback loads a checkpoint and publishes it


class ControlError(OnlineSAOError):
    """The service refused or did not answer."""


class ServiceClient:
    def __init__(
        self, url: str, key: str = "", transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.fault = ""  # why nothing can be asked at all: what to say in place of an answer
        key = key.strip()
        if not (key.isascii() and key.isprintable()):
            self.fault = (
                "The admin key has characters that no request can carry (only plain ASCII ones "
                "can be sent). Enter it again."
            )
            key = ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.Client(
                base_url=self.url, headers=headers, timeout=TIMEOUT_S, transport=transport
            )
        except httpx.InvalidURL as error:
            self.fault = (
                f"{self.url} is no address of a service ({error}). Start the dashboard with "
                "--url http://HOST:PORT."
            )

    def answers(self) -> bool:
        """Whether the service is up."""
        if self.fault:
            return False
        try:
            return self._client.get("/health", timeout=HEALTH_TIMEOUT_S).is_success
        except httpx.HTTPError:
            return False

    def learning(self) -> dict[str, Any]:
        return self._ask("GET", "/v1/learning", timeout=5.0)

    def pause(self) -> dict[str, Any]:
        return self._ask("POST", "/v1/learning/pause")

    def resume(self) -> dict[str, Any]:
        return self._ask("POST", "/v1/learning/resume")

    def rollback(self, version: int) -> dict[str, Any]:
        return self._ask("POST", "/v1/learning/rollback", {"version": version})

    def pin(self, version: int, pinned: bool) -> dict[str, Any]:
        """Keep (or no longer keep) a version's checkpoint from being thinned out."""
        path = "/v1/learning/pin" if pinned else "/v1/learning/unpin"
        return self._ask("POST", path, {"version": version})

    def checkpoint(self) -> dict[str, Any]:
        """Write the current version down, so that it can be gone back to."""
        return self._ask("POST", "/v1/learning/checkpoint")

    def set_preference(self, style: str, pool: list[str], note: str | None) -> dict[str, Any]:
        return self._ask("PUT", "/v1/preference", {"style": style, "pool": pool, "note": note})

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_S
    ) -> dict[str, Any]:
        if self.fault:
            raise ControlError(self.fault)
        try:
            answer = self._client.request(method, path, json=body, timeout=timeout)
        except httpx.TimeoutException:
            raise ControlError(
                f"{self.url} did not answer within {timeout:.0f} s; it may still carry it out. "
                "Look at the status before you try again."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error).split("] ")[-1] or "no answer"
            raise ControlError(f"{self.url} cannot be reached ({why}); is it running?") from None
        try:
            data = answer.json()
        except ValueError:
            data = {}
        if answer.is_success:
            return data if isinstance(data, dict) else {"answer": data}
        if answer.status_code in (401, 403):
            raise ControlError("The service refused the key; enter its admin key above.")
        said = data.get("error", {}) if isinstance(data, dict) else {}
        message = said.get("message") if isinstance(said, dict) else said
        if answer.status_code == 404 and message in (None, "", {}, "Not Found"):
            # A route that it does not have; of what it does not find it says more than that.
            raise ControlError(
                f"The service at {self.url} has no {path}: it is older than this dashboard, so "
                "this cannot be done here. Nothing was changed."
            )
        raise ControlError(
            f"The service refused ({answer.status_code}): {message or answer.text[:200] or path}"
        )
