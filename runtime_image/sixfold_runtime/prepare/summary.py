"""The Job's termination message: Kubernetes keeps 4 KiB of it, so what is longer is cut where it hurts least."""

from __future__ import annotations

from pathlib import Path

from sixfold_api.variant import PreparationSummary

MAX_BYTES = 4096


def encode(summary: PreparationSummary) -> bytes:
    """JSON of at most 4,096 bytes that parses back: labels are cut from their end, a message too."""
    text = _json(summary)
    while len(text) > MAX_BYTES:
        excess = len(text) - MAX_BYTES
        if summary.facts is not None and summary.facts.labels:
            labels = summary.facts.labels[: -max(1, excess // 256)]
            summary = summary.model_copy(update={"facts": summary.facts.model_copy(update={"labels": labels})})
        elif summary.failure is not None and summary.failure.message:
            message = summary.failure.message[: -max(2, excess // 8)] + "…"
            summary = summary.model_copy(update={"failure": summary.failure.model_copy(update={"message": message})})
        text = _json(summary)
    return text


def _json(summary: PreparationSummary) -> bytes:
    return summary.model_dump_json(by_alias=True, exclude_none=True).encode()


def write(summary: PreparationSummary, path: Path) -> bool:
    """Write the message; False where the file can't be written (a laptop has no /dev/termination-log)."""
    try:
        path.write_bytes(encode(summary))
    except OSError:
        return False
    return True
