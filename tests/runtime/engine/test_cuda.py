"""Generation, speculation, the sampler pipeline and quantised linears on a CUDA device, against the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.generation import DraftLength, Overlap
from sixfold_api.runtime_config import SamplerPipelineConfig, ServedModel, SpeculativeConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.loader import load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.settings import RuntimeSettings

DEVICE = torch.device("cuda")
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [30, 31], list(range(40, 75)), [9, 8, 7, 6, 5]]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, new_decoder: Callable[..., Path]) -> tuple[Path, Path]:
    """A target in fp32, and a draft that is a part of it, so that some of its tokens are accepted."""
    target = new_decoder(tmp_path_factory.mktemp("target"))
    draft = new_decoder(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)
    return target, draft


def answers(
    folders: tuple[Path, Path],
    config: Any,
    collector: Any,
    *,
    device: torch.device,
    draft_device: torch.device | None = None,
    speculative: SpeculativeConfig | None = None,
    pipeline: SamplerPipelineConfig | None = None,
    temperature: float = 0.0,
) -> dict[str, str]:
    """The text of each prompt's answer, all of them computed together."""
    target = load(ServedModel(name="chat", task=Task.GENERATION, path=str(folders[0])), device)
    draft = (
        load(ServedModel(name="draft", task=Task.GENERATION, path=str(folders[1])), draft_device)
        if draft_device is not None
        else None
    )
    stable = config.value.stable.model_copy(update={"speculative": speculative, "sampler_pipeline": pipeline})
    config.value = config.value.model_copy(update={"stable": stable})
    runner = GenerationRunner(target, Limits(), config, EngineMetrics(RuntimeSettings()).of("chat"), draft=draft)
    runner.warm_up(1 << 30)
    for index, prompt in enumerate(PROMPTS):
        sampling = Sampling(max_tokens=40, temperature=temperature, seed=11)
        runner.submit(
            (collector, str(index)), Generate(id=str(index), model="chat", token_ids=prompt, sampling=sampling)
        )
    while runner.running or runner.waiting:
        collector.take(runner.step())
    runner.close()
    return {request: collector.text(request) for request in collector.dones}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_device", [None, "cpu", "cuda"])
@pytest.mark.parametrize("overlap", [None, Overlap.ALWAYS])
def test_answers_are_those_of_plain_decoding_on_the_same_device(
    folders: tuple[Path, Path],
    config: Any,
    new_collector: Callable[[], Any],
    temperature: float,
    draft_device: str | None,
    overlap: Overlap | None,
) -> None:
    """fp32, greedy and seeded: neither drafts, on either device, nor the pipeline change a token."""
    plain = answers(folders, config, new_collector(), device=DEVICE, temperature=temperature)
    cheap = answers(
        folders,
        config,
        new_collector(),
        device=DEVICE,
        draft_device=None if draft_device is None else torch.device(draft_device),
        speculative=SpeculativeConfig(num_tokens=4, length=DraftLength.FIXED),
        pipeline=None if overlap is None else SamplerPipelineConfig(workers=2, overlap=overlap),
        temperature=temperature,
    )
    assert cheap == plain
    assert len(plain) == len(PROMPTS)


def test_greedy_answers_are_those_of_the_cpu(
    folders: tuple[Path, Path], config: Any, new_collector: Callable[[], Any]
) -> None:
    assert answers(folders, config, new_collector(), device=DEVICE) == answers(
        folders, config, new_collector(), device=CPU
    )
