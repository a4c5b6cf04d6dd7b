"""What each mode did, from its counters. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from sixfold_runtime.report.model import Counted
from sixfold_runtime.report.parts import ExitDepth, Memory, ModeResult
from sixfold_runtime.report.served import ANSWERS, LABEL_ANSWERS, SLICE_LOADS, SLICE_REQUESTS
from sixfold_runtime.report.words import percent

TALLIES = {
    "sixfold_exit_request_seconds_count": "exited",
    "sixfold_accepted_tokens_total": "",
    "sixfold_draft_tokens_total": "",
    "sixfold_draft_seconds_sum": "",
    "sixfold_verify_seconds_sum": "",
    "sixfold_draft_length_tokens_count": "",
    'sixfold_draft_length_tokens_bucket{le="0.0"}': "",
    "sixfold_kv_blocks_total": "result",
    "sixfold_reused_tokens_total": "",
    "sixfold_tokens_total": "kind",
    "sixfold_slice_loads_total": "result",
    "sixfold_stream_bytes_total": "kind",
    "sixfold_shadow_total": "result",
    LABEL_ANSWERS: "variant",
    ANSWERS: "variant",
    SLICE_LOADS: "task",
    SLICE_REQUESTS: "task",
}
"""Counters, and the label by whose values they are summed; "" sums all."""


class _Tallies:
    def __init__(self, counted: Counted) -> None:
        self._tallies = counted.tallies

    def __call__(self, counter: str, *values: str) -> float | None:
        """Sum over these values of the label, or all; None where nothing was counted."""
        found = [
            number
            for (name, value), number in self._tallies.items()
            if name == f"sixfold_{counter}" and (not values or value in values)
        ]
        return sum(found) if found else None


def modes(counted: Counted) -> Iterator[ModeResult]:
    """Modes of which nothing was counted are left out."""
    of = _Tallies(counted)
    hits = sum(
        number for (name, value), number in counted.tallies.items()
        if name == "sixfold_kv_blocks_total" and value.startswith("hit_")
    )  # fmt: skip
    skipped, blocks = of("kv_blocks_total", "skipped") or 0.0, of("kv_blocks_total")
    padded, actual = of("tokens_total", "padded"), of("tokens_total", "actual") or 0.0
    layers = [f"{mean:.1f}" for _, mean in mean_exit_depth(counted)]
    verified = tokens_per_verification(counted)
    for name, rows in (
        (
            "Early exit",
            (
                (
                    "texts that left early",
                    _percent(of("exit_request_seconds_count", "true"), of("exit_request_seconds_count")),
                ),
                ("layers that a text ran through, on average", " / ".join(layers)),
            ),
        ),
        (
            "Speculative decoding",
            (
                ("drafted tokens that were accepted", _percent(of("accepted_tokens_total"), of("draft_tokens_total"))),
                ("tokens gained by one verification", "" if verified is None else f"{verified:.2f}"),
                ("time of drafting over verifying", _ratio(of("draft_seconds_sum"), of("verify_seconds_sum"))),
            ),
        ),
        (
            "KV reuse",
            (
                ("blocks found of those looked up", _percent(hits, blocks and blocks - skipped)),
                ("tokens of prompts that weren't computed", _number(of("reused_tokens_total"))),
            ),
        ),
        ("Batches by length", (("padding of all token positions", _percent(padded and padded - actual, padded)),)),
        ("Task slices", (("loads of slices", _number(of("slice_loads_total", "ok"))),)),
        (
            "Compressed streaming",
            (
                (
                    "bytes sent of those there were",
                    _percent(of("stream_bytes_total", "sent"), of("stream_bytes_total", "raw")),
                ),
            ),
        ),
        (
            "Shadow",
            (
                (
                    "answers that differ from level 0",
                    _percent(of("shadow_total", "differ"), of("shadow_total", "agree", "differ")),
                ),
            ),
        ),
    ):
        told = tuple((label, text) for label, text in rows if text)
        if told:
            yield ModeResult(name, told)


def tokens_per_verification(counted: Counted) -> float | None:
    """Tokens that a row gained by one forward of the target over a draft: those accepted, and the target's own."""
    of = _Tallies(counted)
    rows = (of("draft_length_tokens_count") or 0.0) - (of('draft_length_tokens_bucket{le="0.0"}') or 0.0)
    return 1 + (of("accepted_tokens_total") or 0.0) / rows if rows > 0 else None


def exits(counted: Counted) -> Iterator[ExitDepth]:
    """Texts by the layer behind which they left."""
    texts: dict[str, float] = defaultdict(float)
    for (variant, _), number in counted.exits.items():
        texts[variant] += number
    for (variant, depth), number in sorted(counted.exits.items()):
        if number > 0:
            yield ExitDepth(variant, depth, number, number / texts[variant])


def mean_exit_depth(counted: Counted) -> Iterator[tuple[str, float]]:
    """Classifier -> layers that a text ran through."""
    for variant in sorted({variant for variant, _ in counted.exits}):
        depths = {depth: number for (name, depth), number in counted.exits.items() if name == variant}
        if (texts := sum(depths.values())) > 0:
            yield variant, sum(depth * number for depth, number in depths.items()) / texts


def memory(counted: Counted) -> Iterator[Memory]:
    """Room for keys and values, and the part of it that nobody used."""
    for variant, room in sorted(counted.rooms.items()):
        if room.reserved_bytes > 0:
            unused = max(0.0, 1 - room.used_bytes / room.reserved_bytes)
            yield Memory(variant, room.reserved_bytes, room.used_bytes, unused)


def _percent(part: float | None, whole: float | None) -> str:
    return percent((part or 0.0) / whole) if whole else ""


def _ratio(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.2f}" if part is not None and whole else ""


def _number(value: float | None) -> str:
    return f"{value:,.0f}" if value else ""
