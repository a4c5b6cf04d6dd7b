"""Several benchmarks one after the other, each in a process of its own: one table, one plot, the raw results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import scoreboard

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
"""Of the last run; ignored by Git. A run of all of them is kept beside it, too."""


def run(names: Sequence[str], *, keep: bool) -> int:
    """Run and write; the exit status is 0 if all ran, whether or not the goals hold."""
    results: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    RESULTS.mkdir(exist_ok=True)
    for number, name in enumerate(names, 1):
        print(f"\n=== {number} of {len(names)}: {name}", flush=True)
        started = time.monotonic()
        result, why = one(name)
        took = f"{time.monotonic() - started:.0f} s"
        if result is None:
            failures[name] = why
            print(f"=== {name} did not run ({took}): {why}", flush=True)
            continue
        results.append(result)
        print(f"=== {name} ran ({took}): {scoreboard.said(result)}", flush=True)
        write(RESULTS, results, failures)
    write(RESULTS, results, failures)
    if keep:
        write(HERE, results, failures, raw=False)
    print(f"\n{len(results)} of {len(names)} ran; the table is in {shown(RESULTS / 'RESULTS.md')}", flush=True)
    for name, why in failures.items():
        print(f"did not run: {name}: {why}", flush=True)
    return 1 if failures else 0


def one(name: str) -> tuple[dict[str, Any] | None, str]:
    """A benchmark's result, or why there is none. What it says is passed on while it runs."""
    command = [sys.executable, str(HERE / "bench.py"), name]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        return None, f"exit status {process.returncode}; its output above says why"
    try:
        result = json.loads(last)
    except ValueError:
        return None, f"its last line is no JSON: {last[:80]}"
    return (result, "") if isinstance(result, dict) else (None, "its last line is no object")


def write(folder: Path, results: Sequence[dict[str, Any]], failures: dict[str, str], *, raw: bool = True) -> None:
    (folder / "RESULTS.md").write_text(scoreboard.markdown(results, failures, about()))
    (folder / "results.svg").write_text(scoreboard.plot(results))
    if raw:
        (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))


def about() -> str:
    """When and where it was measured."""
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown CPU",
    )
    scale = "QUICK=1, about a minute each" if os.environ.get("QUICK") else "at full length"
    return f"Measured on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores of {model}, {gibibytes:.0f} GiB, {scale}."


def shown(path: Path) -> Path:
    return path.relative_to(HERE.parent.parent)
