"""What the driver does to the store from time to time: close idle sessions, forget old texts."""

from __future__ import annotations

import logging
import time

from online_sao.config import ServiceConfig
from online_sao.errors import StoreError
from online_sao.store import RolloutStore

log = logging.getLogger(__name__)

SESSIONS_PERIOD_S = 5.0
RETENTION_PERIOD_S = 3600.0


class Housekeeper:
    """`run_due` does what is due now, and is called again and again."""

    def __init__(self, store: RolloutStore, config: ServiceConfig) -> None:
        self._store = store
        self._config = config
        self._sessions_at = self._retention_at = 0.0  # not before these times

    def run_due(self) -> None:
        """A store that refuses is asked again the next time."""
        now = time.monotonic()
        try:
            if now >= self._sessions_at:
                self._store.close_idle_sessions(self._config.session_idle_s)
                self._sessions_at = now + SESSIONS_PERIOD_S
            if self._config.retention_days is not None and now >= self._retention_at:
                self._store.delete_older_than(self._config.retention_days)
                self._retention_at = now + RETENTION_PERIOD_S
        except StoreError as error:
            log.warning("housekeeping: %s", error)
