"""The Job's termination message: Kubernetes keeps 4 KiB of it, so what is longer is cut where it hurts least."""

from __future__ import annotations

from pathlib import Path

from sixfold_api.variant import PreparationSummary

MAX_BYTES = 4096


def encode(summary: PreparationSummary) -> bytes:
    """JSON of at most 4,096 bytes that parses back: labels are cut from their end, then a message, then slices. The
    report beside the weights has all of them."""
    text = _json(summary)
    while len(text) > MAX_BYTES:
        shorter = _shorter(summary, len(text) - MAX_BYTES)
        if shorter is None:
            break
        summary, text = shorter, _json(shorter)
    return text


def _shorter(summary: PreparationSummary, excess_bytes: int) -> PreparationSummary | None:
    """One cut; None if nothing is left to cut."""
    facts, failure = summary.facts, summary.failure
    if facts is not None and facts.labels:
        labels = facts.labels[: -max(1, excess_bytes // 256)]
        return summary.model_copy(update={"facts": facts.model_copy(update={"labels": labels})})
    if failure is not None and len(failure.message) > 1:
        message = failure.message[: -max(2, excess_bytes // 8)] + "…"
        return summary.model_copy(update={"failure": failure.model_copy(update={"message": message})})
    if summary.slices:
        return summary.model_copy(update={"slices": summary.slices[:-1]})
    return None


def _json(summary: PreparationSummary) -> bytes:
    return summary.model_dump_json(by_alias=True, exclude_none=True).encode()


def write(summary: PreparationSummary, path: Path) -> bool:
    """Write the message; False where the file can't be written (a laptop has no /dev/termination-log)."""
    try:
        path.write_bytes(encode(summary))
    except OSError:
        return False
    return True
