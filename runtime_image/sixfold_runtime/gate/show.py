"""The gate's verdict for people, for machines, and for the page of a pipeline's run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sixfold_runtime.gate.command import Outcome
from sixfold_runtime.gate.compare import Row, Verdict, compare
from sixfold_runtime.gate.record import GateError, Metric, Record

_NAMES = {
    Metric.ENGINE_SECONDS: "engine ms a request",
    Metric.P95_SECONDS: "P95 ms",
    Metric.TOKENS_PER_SECOND: "tokens/s",
    Metric.MEMORY_BYTES: "weights + KV MiB",
    Metric.FLOPS: "MFLOP a request",
    Metric.WASTED_FLOPS_RATIO: "wasted FLOPs %",
}
_SCALES = {
    Metric.ENGINE_SECONDS: 1e3,
    Metric.P95_SECONDS: 1e3,
    Metric.TOKENS_PER_SECOND: 1.0,
    Metric.MEMORY_BYTES: 1 / 2**20,
    Metric.FLOPS: 1e-6,
    Metric.WASTED_FLOPS_RATIO: 100.0,
}
_STYLES = {Verdict.WORSE: "bold red", Verdict.GONE: "bold red", Verdict.BETTER: "green", Verdict.NOT_COMPARED: "yellow"}
_HEADS = ("kind", "figure", "baseline", "candidate", "worse by", "spread", "verdict")


def show(outcome: Outcome, output: str, console: Console) -> None:
    """Print it as a table, as json or as markdown; in a GitHub Actions job also on the page of the run.

    Raises GateError: that page can't be written.
    """
    if output == "json":
        print(json.dumps(document(outcome), indent=2))
    elif output == "markdown":
        print(markdown(outcome), end="")
    else:
        table(outcome, console)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown(outcome))
        except OSError as error:
            raise GateError(f"GITHUB_STEP_SUMMARY: {summary} can't be written: {error.strerror}") from error


def table(outcome: Outcome, console: Console) -> None:
    shown = Table(title=escape(_title(outcome)), title_justify="left")
    for head in _HEADS:
        shown.add_column(head, justify="left" if head in ("kind", "figure", "verdict") else "right")
    for row in _rows(outcome):
        shown.add_row(*map(escape, _cells(row)), style=_STYLES.get(row.verdict))
    console.print(shown)
    for line in _notes(outcome):
        console.print(escape(line), highlight=False, soft_wrap=True)
    style = "green" if outcome.passed else "bold red"
    for line in verdict(outcome):
        console.print(escape(line), style=style, highlight=False, soft_wrap=True)


def markdown(outcome: Outcome) -> str:
    lines = [f"### {_title(outcome)}", ""]
    lines += ["| " + " | ".join(_HEADS) + " |", "|---|---|--:|--:|--:|--:|---|"]
    for row in _rows(outcome):
        cells = [cell.replace("|", r"\|") for cell in _cells(row)]
        if row.verdict in (Verdict.WORSE, Verdict.GONE):
            cells[-1] = f"**{cells[-1]}**"
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"- {line}" for line in _notes(outcome)), *(f"- ⚠️ {warning}" for warning in outcome.warnings), ""]
    lines += [f"**{line}**  " for line in verdict(outcome)]
    return "\n".join(lines) + "\n"


def document(outcome: Outcome) -> dict[str, Any]:
    """For `-o json`. A change without bounds is null."""
    comparison = outcome.comparison
    return {
        "passed": outcome.passed,
        "reasons": [] if outcome.passed else verdict(outcome),
        "limit": None if comparison is None else comparison.limit,
        "figures": [
            {
                "kind": row.kind,
                "metric": row.metric.value,
                "baseline": row.baseline,
                "candidate": row.candidate,
                "worseBy": _finite(row.change),
                "spread": _finite(row.spread),
                "verdict": row.verdict.value,
            }
            for row in _rows(outcome)
        ],
        "agreement": [
            {"kind": one.kind, "same": one.same, "total": one.total}
            for one in (comparison.agreement if comparison else ())
        ],
        "warnings": list(outcome.warnings),
        "candidate": msgspec.to_builtins(outcome.record),
    }


def verdict(outcome: Outcome) -> list[str]:
    """Passed, or why not, a line each."""
    if outcome.comparison is None:
        return ["There was no baseline to compare with: this is one now."]
    if outcome.passed:
        return [f"Passed: nothing is worse by more than {_percent(outcome.comparison.limit)} and its spread."]
    return [_reason(row, outcome.comparison.limit) for row in outcome.comparison.failures]


def _reason(row: Row, limit: float) -> str:
    name = f"{row.kind}: {_NAMES[row.metric]}"
    if row.verdict is Verdict.GONE:
        return f"Failed: {name}: the candidate doesn't serve this any more"
    return (
        f"Failed: {name} {_number(row.metric, row.baseline)} -> {_number(row.metric, row.candidate)},"
        f" worse by {_percent(row.change)} (limit {_percent(limit)}, spread {_percent(row.spread)})"
    )


def _title(outcome: Outcome) -> str:
    record = outcome.record
    return (
        f"sixfold gate: {record.policy} at level {record.level} ({', '.join(record.modes) or 'no modes'});"
        f" {record.workload.requests} requests of each kind, medians of {record.workload.repeats} repeats"
    )


def _rows(outcome: Outcome) -> Sequence[Row]:
    if outcome.comparison is not None:
        return outcome.comparison.rows
    own = compare(outcome.record, outcome.record, 0.0).rows
    return [Row(r.kind, r.metric, None, r.candidate, None, r.spread, Verdict.NEW) for r in own]


def _cells(row: Row) -> list[str]:
    figures = [_number(row.metric, row.baseline), _number(row.metric, row.candidate)]
    return [row.kind, _NAMES[row.metric], *figures, _percent(row.change), _percent(row.spread), row.verdict.value]


def _notes(outcome: Outcome) -> Iterator[str]:
    if outcome.comparison is not None:
        for one in outcome.comparison.agreement:
            yield f"{one.kind}: {one.same} of {one.total} greedy answers are the baseline's"
    if outcome.record.waste:
        before = "" if outcome.comparison is None else f" (baseline {_waste(outcome.comparison.baseline)})"
        yield f"wasted operations: {_waste(outcome.record)}{before}"
    yield from _costs(outcome.record, outcome)


def _waste(record: Record) -> str:
    """The causes, worst first."""
    causes = sorted(record.waste.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{cause} {_percent(share)}" for cause, share in causes) or "none"


def _costs(record: Record, outcome: Outcome) -> Iterator[str]:
    """What the policy's costPerHour makes of the engine's time."""
    for row in _rows(outcome):
        price = record.cost_per_hour.get(row.kind)
        if row.metric is not Metric.ENGINE_SECONDS or price is None or row.candidate is None:
            continue
        before = "" if row.baseline is None else f" (baseline {_million(row.baseline, price):.3g})"
        yield f"{row.kind}: a million requests cost {_million(row.candidate, price):.3g}{before}"


def _million(engine_seconds: float, cost_per_hour: float) -> float:
    return engine_seconds * cost_per_hour / 3600 * 1e6


def _number(metric: Metric, value: float | None) -> str:
    if value is None:
        return "-"
    scaled = value * _SCALES[metric]
    return f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.3g}"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return "∞" if math.isinf(share) else f"{100 * share:+.1f} %" if share < 0 else f"{100 * share:.1f} %"


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
