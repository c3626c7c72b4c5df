"""Structured logs: one JSON object a line, a file per part, in RUN_DIR/logs.

A line names the rollout and the weight version that it is about, never what was asked or
answered, and never a key.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import traceback
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from online_sao.config import ServiceConfig

FOLDER = "logs"
LOGGERS = ("online_sao", "judge")
FIELDS = ("rollout_id", "weight_version", "reward", "state", "seconds", "replica", "guard")
"""What a log call may give as `extra`; anything else is left out."""
SECRET_ENDINGS = ("_API_KEY", "_ADMIN_KEY", "_PASSWORD", "_TOKEN")
SECRET_MIN_CHARS = 6  # shorter ones would blank out ordinary words
KEPT_FILES = 3
KEPT_PARTS = 8
"""Of parts that get a new name with every start (replicas), so many keep their files."""


class JsonLines(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": _without_secrets(record.getMessage()),
        }
        for name in FIELDS:
            if hasattr(record, name):
                line[name] = getattr(record, name)
        if record.exc_info:
            line["exception"] = _without_secrets(
                "".join(traceback.format_exception(*record.exc_info))
            )
        return json.dumps(line, ensure_ascii=False, default=str)


def start_log(config: ServiceConfig, run_dir: Path, part: str) -> None:
    """Write this process's log lines to RUN_DIR/logs/PART.jsonl, once.

    A folder that cannot be written costs the log, not the service.
    """
    try:
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(
            folder / f"{part}.jsonl",
            maxBytes=config.log_max_bytes,
            backupCount=KEPT_FILES,
            encoding="utf-8",
            errors="backslashreplace",
        )
    except OSError as error:
        logging.getLogger(__name__).warning("no log file: %s", error)
        return
    handler.setFormatter(JsonLines(part))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if isinstance(h, RotatingFileHandler)]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(config.log_level.upper())


def forget_old_logs(run_dir: Path, prefix: str, keep: int = KEPT_PARTS) -> None:
    """Remove the files of all but the `keep` parts named `prefix`... that wrote last."""
    written: dict[str, float] = {}
    files: list[tuple[str, Path]] = []
    for path in (run_dir / FOLDER).glob(f"{glob.escape(prefix)}*.jsonl*"):
        with contextlib.suppress(OSError):  # another replica tidies up too
            part = path.name.partition(".")[0]
            files.append((part, path))
            written[part] = max(written.get(part, 0.0), path.stat().st_mtime)
    kept = set(sorted(written, key=lambda part: written[part], reverse=True)[:keep])
    for part, path in files:
        if part not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def _without_secrets(text: str) -> str:
    """Error messages of other people's libraries may quote a key."""
    for name, value in os.environ.items():
        if name.endswith(SECRET_ENDINGS) and len(value) >= SECRET_MIN_CHARS:
            text = text.replace(value, "***")
    return text
