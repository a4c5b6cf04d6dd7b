"""What the engine takes from its machine."""

from __future__ import annotations

import pytest
import torch

from sixfold_runtime.engine.device import available_memory_bytes, choose_device, fastest_threads, quota_threads
from sixfold_runtime.engine.loader import Weights, compute_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("cpu_max", "threads"),
    [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("garbage", 8)],
)
def test_threads_follow_the_containers_quota(cpu_max: str, threads: int) -> None:
    assert quota_threads(cpu_max, 8) == threads


@pytest.mark.parametrize("name", ["tpu", "", "gpu", "mps"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use auto, cpu or cuda"):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_is_refused_where_there_is_none() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")


def test_memory_is_known() -> None:
    assert available_memory_bytes(CPU) > 0


@pytest.mark.parametrize(
    ("device", "available", "expected"),
    [(CPU, 8000, torch.float32), (CPU, 7999, torch.bfloat16), (CUDA, 10**12, torch.bfloat16)],
)
def test_the_compute_type_is_fp32_on_a_cpu_with_room(
    device: torch.device, available: int, expected: torch.dtype
) -> None:
    assert compute_dtype(Weights(parameters=1000, dtype=torch.bfloat16), device, available) == expected


@pytest.mark.parametrize(
    ("seconds", "most", "expected"),
    [
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4, 4),
        ({1: 1.0, 2: 0.95, 4: 0.94}, 4, 1),
        ({1: 1.0, 2: 3.0, 3: 0.5}, 3, 3),
        ({1: 1.0, 2: 50.0}, 2, 1),
        ({1: 1.0}, 1, 1),
    ],
)
def test_the_thread_count_that_pays_is_used(seconds: dict[int, float], most: int, expected: int) -> None:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += seconds[torch.get_num_threads()]

    before = torch.get_num_threads()
    try:
        assert fastest_threads(step, most, lambda: now) == expected == torch.get_num_threads()
        assert now <= 9.001 * sum(seconds.values())
    finally:
        torch.set_num_threads(before)
