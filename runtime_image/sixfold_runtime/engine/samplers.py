"""Which sampler a model's steps go to: in line, or the sampler pipeline while the configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sixfold_api.generation import Overlap
from sixfold_api.runtime_config import SamplerPipelineConfig
from sixfold_runtime.engine.pipeline import InlineSampler, LogitsSampler, SamplerPipeline

IN_LINE = "in line: without a GPU nothing computes meanwhile (samplerPipeline.overlap: Always overlaps all the same)"


class Samplers:
    """Owns the pipeline: made when it is first asked for, resized and closed as the configuration changes.

    Attributes:
        problem: why the pipeline isn't used though it is asked for; "" if it is.
    """

    def __init__(self, device: torch.device, step_bytes: int, waited: Callable[[float], None]) -> None:
        """
        Args:
            step_bytes: of the logits of the largest step.
            waited: told how long each step's logits waited for a free slot.
        """
        self._device = device
        self._step_bytes = step_bytes
        self._waited = waited
        self._pipeline: SamplerPipeline | None = None
        self._config: SamplerPipelineConfig | None = None
        self.inline = InlineSampler()
        self.problem = ""

    @property
    def is_overlapping(self) -> bool:
        return self._pipeline is not None

    def current(self, config: SamplerPipelineConfig | None) -> LogitsSampler:
        """The sampler for the next step."""
        before, self._config = self._config, config
        if config == before:
            return self._pipeline or self.inline
        if self._pipeline and before and config and before.model_copy(update={"workers": config.workers}) == config:
            self._pipeline.resize(config.workers)
        else:
            self._apply(config)
        return self._pipeline or self.inline

    def _apply(self, config: SamplerPipelineConfig | None) -> None:
        self.problem = ""
        if config is not None and config.overlap is Overlap.AUTO and self._device.type != "cuda":
            self.problem, config = IN_LINE, None
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        if config is None:
            return
        try:
            self._pipeline = SamplerPipeline(
                self._device,
                workers=config.workers,
                needed_bytes=self._step_bytes,
                buffer_bytes=config.buffer_bytes,
                waited=self._waited,
            )
        except ValueError as error:
            self.problem = f"in line: {error}"
