"""Which sampler steps go to, as the configuration changes."""

from __future__ import annotations

import torch

from sixfold_api.generation import Overlap
from sixfold_api.runtime_config import SamplerPipelineConfig
from sixfold_runtime.engine.samplers import Samplers

ONE = SamplerPipelineConfig(workers=1, overlap=Overlap.ALWAYS)
TWO = SamplerPipelineConfig(workers=2, overlap=Overlap.ALWAYS)


def samplers() -> Samplers:
    return Samplers(torch.device("cpu"), 1024, lambda _: None)


def test_more_workers_join_the_same_pipeline() -> None:
    chosen = samplers()
    first = chosen.current(ONE)
    assert first is not chosen.inline
    assert chosen.current(TWO) is first
    assert chosen.current(None) is chosen.inline
    assert not chosen.is_overlapping


def test_without_a_gpu_it_is_in_line_and_says_so() -> None:
    chosen = samplers()
    assert chosen.current(SamplerPipelineConfig(workers=1)) is chosen.inline
    assert "without a GPU" in chosen.problem


def test_a_buffer_that_is_too_small_is_named() -> None:
    chosen = samplers()
    small = ONE.model_copy(update={"buffer_bytes": 8})
    assert chosen.current(small) is chosen.inline
    assert "bufferSize is 8 bytes" in chosen.problem
