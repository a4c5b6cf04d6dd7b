"""What was measured, and the file that keeps it as a baseline."""

from __future__ import annotations

import os
import platform
import tempfile
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

SCHEMA = "sixfold.dev/gate/v1"
ALL = "all"
"""The kind of figures that are of the whole workload."""


class GateError(Exception):
    """Why nothing can be measured or compared, for the person who asked."""


class Metric(StrEnum):
    """What is measured."""

    ENGINE_SECONDS = "engine_seconds"
    """Of the engine's time, the mean request's share: what a request costs."""
    P95_SECONDS = "p95_seconds"
    """From submission to the last token or label."""
    TOKENS_PER_SECOND = "tokens_per_second"
    """Of answers; where texts are classified, of the texts."""
    MEMORY_BYTES = "memory_bytes"
    """Of weights, task slices, and keys and values at their most."""
    FLOPS = "flops"
    """Floating-point operations a request."""
    WASTED_FLOPS_RATIO = "wasted_flops_ratio"
    """The share of them that bought nothing."""

    @property
    def is_time(self) -> bool:
        """Whether it means something on the same machine only."""
        return self in (Metric.ENGINE_SECONDS, Metric.P95_SECONDS, Metric.TOKENS_PER_SECOND)


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value for each repeat."""

    kind: str
    metric: Metric
    values: list[float]
    paces: list[float] = []
    """Of a time: how long a fixed calculation took meanwhile, in seconds."""


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cpus: int
    device: str
    """`cpu`, or the accelerator's name."""
    threads: int
    """That torch computes with."""


class Workload(msgspec.Struct, frozen=True):
    digest: str
    requests: int
    """Of each kind."""
    repeats: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A measured candidate."""

    schema: str = SCHEMA
    made: str
    """ISO 8601, UTC."""
    policy: str
    level: int
    modes: list[str]
    """That were on."""
    machine: Machine
    versions: dict[str, str]
    workload: Workload
    figures: list[Figure]
    answers: dict[str, list[list[str]]]
    """By kind and request, digests of the greedy answers or labels that the repeats gave: rounding may differ with the
    requests that are computed together, so a request can have several."""
    waste: dict[str, float] = {}
    """By cause, the share of the operations that it wasted."""
    cost_per_hour: dict[str, float] = {}
    """By kind, of a pod, where the policy says so."""


def read(path: Path) -> Record:
    """Raises GateError: the file is missing, or no baseline of this version."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise GateError(
            f"there is no baseline {path}: make one from what is good now, with the same command and --update-baseline"
        ) from None
    except OSError as error:
        raise GateError(f"{path}: {error.strerror}") from error
    try:
        record = msgspec.json.decode(content, type=Record)
    except msgspec.DecodeError as error:  # a ValidationError too
        raise GateError(f"{path} is no baseline: {error}; make it again with --update-baseline") from error
    if record.schema != SCHEMA:
        raise GateError(f"{path} has the schema {record.schema!r}, not {SCHEMA}: make it again with --update-baseline")
    if any(not figure.values for figure in record.figures):
        raise GateError(f"{path} is no baseline: a figure has no values; make it again with --update-baseline")
    return record


def write(path: Path, record: Record) -> None:
    """All of it or nothing. Raises GateError."""
    content = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(content)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise GateError(f"{path} can't be written: {error.strerror}") from error


def today() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("sixfold", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def machine(device: str, threads: int) -> Machine:
    """This one."""
    return Machine(_cpu_model(), len(os.sched_getaffinity(0)), device, threads)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
