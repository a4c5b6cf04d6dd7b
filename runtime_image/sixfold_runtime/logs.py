"""Logs as one JSON object a line, for gateway and engine alike. Prompts, answers and keys never go into a record."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


def rfc3339(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """`log.info("...", extra={"fields": {...}})` puts the fields beside time, severity, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": rfc3339(record.created),
            "severity": record.levelname.lower(),  # `level` is the rollback level
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def setup_logging(level: str = "INFO") -> None:
    """All loggers of the process write JSON lines to stdout; the access log of uvicorn is off, ours says more."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    quiet_torchao()
    for name in ("httpx", "httpcore", "uvicorn", "websockets"):
        logging.getLogger(name).setLevel(logging.WARNING)


def quiet_torchao() -> None:
    """torchao, which GPTQModel brings and transformers imports, warns of its own use of torch: nobody can act on it."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
