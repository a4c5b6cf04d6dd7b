"""Tasks in memory on demand, over all of them in memory, where feed-forward slices dominate.

Six tasks over the sentiment model's trunk, each with all its feed-forward matrices replaced and a head of its own, cut
out of six whole checkpoints by `sixfold prepare slice cut`. What the matrices say doesn't matter for memory and time,
so the checkpoints are the model with noise. The engine serves them in this process: on demand from level 3, with one
task pinned; below it all of them stay. Bytes come from the engine's metrics and, to check these, from /proc.
Files lie in the page cache, as on a node that has served them before.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stack import model_folders

from sixfold_runtime.engine.device import set_threads
from sixfold_runtime.engine.slice_file import slice_info, slice_path
from sixfold_runtime.prepare.files import files_in, is_made
from sixfold_runtime.prepare.slice_cut import cut
from sixfold_runtime.prepare.slice_trunk import SliceTrunk, label_logits, open_model, open_trunk
from sixfold_runtime.sdk import InferenceEngine

TASKS = [f"task-{index}" for index in range(6)]
HOT = TASKS[0]
SAVING_GOAL, SHARE_GOAL, COLD_MS_GOAL, LOGITS_GOAL = 0.95, 0.5, 15.0, 1e-5
CPU = torch.device("cpu")
TEXT = "A film that is longer than it has to be, and that nobody will regret to have seen."
_NOISE = 0.02
_WAIT_SECONDS = 30.0


def run(quick: bool) -> dict[str, Any]:
    set_threads()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "trunk"
        distance = build(model_folders()["sentiment"], folder, Path(place) / "tuned")
        result = measure(folder, rounds=4 if quick else 20)
    result["logits_distance"] = distance
    parts = {
        "saving": result["saving"] / SAVING_GOAL,
        "share": SHARE_GOAL / result["share"],
        "cold": COLD_MS_GOAL / max(result["cold_ms_over_resident"], 1e-3),
        "logits": LOGITS_GOAL / max(distance, 1e-9),
    }
    goals = {"saving": SAVING_GOAL, "share": SHARE_GOAL, "cold_ms": COLD_MS_GOAL, "logits": LOGITS_GOAL}
    # The goal that is the hardest to reach decides.
    return {"ratio": round(min(parts.values()), 3), "goal": 1.0, "goals": goals, **result}


def build(source: Path, folder: Path, tuned: Path) -> float:
    """The trunk with six slices in `folder`; the largest difference of a logit from the unsliced checkpoints."""
    folder.mkdir()
    for name in files_in(source, source):
        if not is_made(name):
            shutil.copyfile(source / name, folder / name)
    trunk = open_trunk(folder, CPU)
    distance = 0.0
    for seed, task in enumerate(TASKS):
        _tune(folder, tuned, seed)
        cut(trunk, tuned, slice_path(folder, task), lambda line: print(line, flush=True))
        distance = max(distance, _distance(trunk, tuned, task))
        shutil.rmtree(tuned)
    return distance


def _tune(folder: Path, tuned: Path, seed: int) -> None:
    shutil.copytree(folder, tuned, ignore=shutil.ignore_patterns("slices"))
    noise = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if (".output.dense." in name and ".attention." not in name) or ".intermediate." in name or "classifier" in name:
            tensors[name] = tensor + _NOISE * torch.randn(tensor.shape, generator=noise)
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})


def _distance(trunk: SliceTrunk, tuned: Path, task: str) -> float:
    ids = [trunk.model.tokenizer.tokenizer.encode(TEXT * count).ids for count in (1, 2, 5)]
    sliced = label_logits(trunk.model, ids, trunk.load(slice_path(trunk.folder, task)))
    return max(
        float((ours - whole).abs().max())
        for ours, whole in zip(sliced, label_logits(open_model(tuned, CPU), ids, None), strict=True)
    )


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    sizes = {task: slice_info(slice_path(folder, task)).size_bytes for task in TASKS}
    # Room for the pinned task and one other.
    room = sizes[HOT] + max(sizes.values())
    with InferenceEngine(folder, pinned=[HOT], cache_bytes=room, device="cpu") as engine:
        hot = _settled(engine, folder, sizes[HOT])
        engine.level = 2
        everything = _settled(engine, folder, sum(sizes.values()))
        engine.level = 3
        _settled(engine, folder, room)
        cold, resident = _first_requests(engine, rounds)
    allowed = sum(sizes.values()) - sizes[HOT]
    result = {
        "weights_bytes": hot.weights,
        "slice_bytes": sizes[HOT],
        "hot": vars(hot),
        "all": vars(everything),
        "saving": round((everything.mapped - hot.mapped) / allowed, 4),
        "saving_of_process": round((everything.process - hot.process) / allowed, 4),
        "share": round((hot.weights + hot.mapped) / (everything.weights + everything.mapped), 4),
        "cold_ms": _median(cold, "wall_ms"),
        "resident_ms": _median(resident, "wall_ms"),
        "cold_ms_over_resident": round(_median(cold, "wall_ms") - _median(resident, "wall_ms"), 2),
        # What other processes on the machine don't disturb.
        "cold_cpu_ms_over_resident": round(_median(cold, "cpu_ms") - _median(resident, "cpu_ms"), 2),
        "requests": len(cold),
    }
    print(json.dumps(result), flush=True)
    return result


@dataclass(frozen=True)
class Took:
    """One request."""

    wall_ms: float
    cpu_ms: float
    """Of all threads of the process: loading is done by another one."""


def _median(took: list[Took], what: str) -> float:
    return round(statistics.median(getattr(each, what) for each in took), 2)


def _first_requests(engine: InferenceEngine, rounds: int) -> tuple[list[Took], list[Took]]:
    """Requests whose task has to be loaded, and those after each of them."""
    _timed(engine, HOT)
    cold, resident = [], []
    for _ in range(rounds):
        for task in TASKS[1:]:  # each makes room by letting the one before go
            cold.append(_timed(engine, task))
            resident.append(_timed(engine, task))
    return cold, resident


def _timed(engine: InferenceEngine, task: str) -> Took:
    began, began_cpu = time.perf_counter(), time.process_time()
    engine.classify(TEXT, task=task)
    return Took(1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu))


@dataclass(frozen=True)
class Memory:
    """Bytes in memory at one moment."""

    weights: int
    """Of the trunk, by the engine's metric."""
    slices: int
    """By the engine's metric."""
    mapped: int
    """Resident pages of the slices' files in this process."""
    process: int
    """Resident of the whole process."""

    @classmethod
    def of(cls, engine: InferenceEngine, folder: Path) -> Memory:
        registry = engine.metrics.registry
        samples = [s for family in registry.collect() for s in family.samples if s.name == "sixfold_memory_bytes"]
        kinds = {sample.labels["kind"]: int(sample.value) for sample in samples}
        mapped, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first = line.split()[0]
            if not first.endswith(":"):
                inside = f"{folder}/slices/" in line
            elif first == "Rss:" and inside:
                mapped += int(line.split()[1]) * 1024
        resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
        return cls(kinds["weights"], kinds["slices"], mapped, int(resident.split()[1]) * 1024)


def _settled(engine: InferenceEngine, folder: Path, slice_bytes: int) -> Memory:
    """Once the engine's metric says so many bytes of slices, and what was let go of is unmapped."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        memory = Memory.of(engine, folder)
        # A file's pages are whole ones, and its header is no tensor.
        if memory.slices == slice_bytes and abs(memory.mapped - slice_bytes) < 0.02 * slice_bytes:
            return memory
        time.sleep(0.05)
    raise TimeoutError(f"slices of {slice_bytes} bytes should be in memory after {_WAIT_SECONDS} s, it is {memory}")
