"""Verdicts kept in one SQLite file, keyed by everything that could change them."""

from __future__ import annotations

import json
import sqlite3
import threading
from dataclasses import asdict
from pathlib import Path

from judge.verdict import JudgeError, Verdict


class VerdictCache:
    """Several threads and processes may share the file. A fault while judging is counted
    in `num_faults` and otherwise ignored: the verdict is then simply asked for again."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.num_faults = 0
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                self.path, timeout=5.0, check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, verdict TEXT NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise JudgeError(f"The verdict cache {self.path} cannot be opened: {error}.") from None

    def get(self, key: str) -> Verdict | None:
        with self._lock:
            try:
                row = self._db.execute(
                    "SELECT verdict FROM verdicts WHERE key = ?", (key,)
                ).fetchone()
                return Verdict(**json.loads(row[0])) if row else None
            except (sqlite3.Error, ValueError, TypeError):
                self.num_faults += 1
                return None

    def put(self, key: str, verdict: Verdict) -> None:
        with self._lock:
            try:
                self._db.execute(
                    "INSERT OR REPLACE INTO verdicts VALUES (?, ?)",
                    (key, json.dumps(asdict(verdict))),
                )
            except (sqlite3.Error, ValueError):
                self.num_faults += 1

    def close(self) -> None:
        with self._lock:
            self._db.close()
