"""What the machine offers: device, threads, memory. Container limits count, not the node's size."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_TRIAL_STEPS = 8
_FASTER = 0.9


def choose_device(wanted: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:1` means here.

    Raises:
        ValueError: the name is no device, or CUDA is wanted where there is none.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"SIXFOLD_DEVICE={wanted!r} is no device: use auto, cpu or cuda")
    device = torch.device(wanted)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"SIXFOLD_DEVICE={wanted!r}, but no CUDA device is visible in this container")
    return device


def quota_threads(cpu_max: str, processors: int) -> int:
    """Threads that a cgroup v2 `cpu.max` (such as `150000 100000` or `max 100000`) allows, at most `processors`."""
    fields = cpu_max.split()
    if len(fields) != 2 or fields[0] == "max":
        return processors
    return max(1, min(processors, math.ceil(int(fields[0]) / int(fields[1]))))


def set_threads() -> int:
    """Give torch as many threads as the container has CPUs; OMP_NUM_THREADS wins. Returns the count.

    Without this, torch starts a thread for each core of the node and a pod with a small CPU limit is throttled.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        quota = _CGROUP / "cpu.max"
        processors = len(os.sched_getaffinity(0))
        torch.set_num_threads(quota_threads(quota.read_text(), processors) if quota.exists() else processors)
    return torch.get_num_threads()


def fastest_threads(step: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """With how many threads a step is fastest here and now, of 1, 2, 4, ... up to `most`.

    More is often slower: a small model's operations are shorter than waking a thread, and on a machine that others
    use too, each waits for the thread that has no core (measured: 2.5 ms a step alone, seconds with two). Another
    count must be faster by a tenth. Leaves torch with the count that it returns.
    """
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    best, best_seconds = 1, math.inf
    for threads in counts:
        torch.set_num_threads(threads)
        step()
        began = clock()
        for _ in range(_TRIAL_STEPS):
            step()
            if clock() - began > best_seconds:
                break
        if (seconds := clock() - began) < best_seconds * _FASTER:
            best, best_seconds = threads, seconds
    torch.set_num_threads(best)
    return best


def available_memory_bytes(device: torch.device) -> int:
    """Bytes that can still be taken: free device memory, else what the node and the container's limit leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _field(_MEMINFO.read_text(), "MemAvailable:") * 1024
    limit, current, stat = (_CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        # Like the kubelet: pages of files that nobody used lately are given back when needed.
        working_set = int(current.read_text()) - _field(stat.read_text(), "inactive_file")
        available = min(available, max(0, int(text) - working_set))
    return available


def _field(text: str, name: str) -> int:
    """Second word of the line that begins with `name`."""
    for line in text.splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"no {name} in {text[:80]!r}: a kernel with cgroup v2 is needed")
