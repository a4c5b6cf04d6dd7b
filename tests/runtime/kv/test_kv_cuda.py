"""Keys and values that come from a GPU and go to one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "e2e")]

from kv_pods import PROMPT, SCOPE, TOKENS, Pod, random_planes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_copies_are_waited_for_on_cuda_and_what_is_found_is_pinned(open_pod: Callable[..., Pod]) -> None:
    pod = open_pod(None, store="Memory", pin_memory=True)
    planes = random_planes(len(TOKENS))
    hosts = [torch.empty(plane.shape, pin_memory=True) for plane in planes]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):  # so that the copies below are far behind when they are handed over
        busy = busy @ busy.T / 4096
    for host, plane in zip(hosts, planes, strict=True):
        host.copy_(plane.cuda(), non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    pod.store.keep(SCOPE, TOKENS, 0, hosts[0], hosts[1], ready=ready)
    assert pod.store.settle(10)
    prefix = pod.find(PROMPT).prefix
    assert prefix is not None and prefix.keys.is_pinned() and prefix.values.is_pinned()
    torch.testing.assert_close(prefix.keys, planes[0], rtol=0, atol=float(planes[0].abs().max()) / 250)
    torch.testing.assert_close(prefix.keys.cuda(non_blocking=True).cpu(), prefix.keys)
