"""Makes sequences of requests: what is checked when they come, and what is stamped on them when they begin."""

from __future__ import annotations

from collections.abc import Callable

from sixfold_api.runtime_config import RuntimeConfig
from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.logprobs import TokenBytes
from sixfold_runtime.engine.picker import Picker
from sixfold_runtime.engine.protocol import Generate
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.speculation import acceptance_of
from sixfold_runtime.engine.stream import OutputStream
from sixfold_runtime.engine.work import CurrentConfig, Key, arm_in_use, check_context, check_prompt, check_sampling


class Intake:
    """For one runner.

    Attributes:
        context_tokens: longest prompt and answer together.
    """

    def __init__(
        self, model: LoadedModel, forward: Forward, has_draft: bool, config: CurrentConfig, clock: Callable[[], float]
    ) -> None:
        self.context_tokens = model.context_tokens
        self._model = model
        self._forward = forward
        self._has_draft = has_draft
        self._config = config
        self._clock = clock
        self._token_bytes = TokenBytes(model.tokenizer.tokenizer)

    def sequence(self, key: Key, request: Generate) -> Sequence:
        """A sequence that has not begun. Raises RequestError: it can't be served."""
        check_prompt(request.token_ids, self._model.vocabulary_tokens)
        prompt_tokens, sampling = len(request.token_ids), request.sampling
        check_sampling(sampling)
        check_context(prompt_tokens, self.context_tokens)
        max_tokens = min(sampling.max_tokens, self.context_tokens - prompt_tokens)
        config = self._config()
        return Sequence(
            key=key,
            request=request,
            stream=OutputStream(self._model.tokenizer.tokenizer, sampling.stop, self._model.eos_ids, max_tokens),
            max_tokens=max_tokens,
            arrived_seconds=self._clock(),
            level=config.of(request.arm).level,
            arm=arm_in_use(config, request.arm),
            context=list(request.token_ids),
        )

    def begin(self, sequence: Sequence, config: RuntimeConfig) -> None:
        """Stamp what its arm obeys now on a sequence; it keeps that."""
        effective = config.of(sequence.request.arm)
        sequence.level, sequence.arm = effective.level, arm_in_use(config, sequence.request.arm)
        sequence.shadow_rate = 0.0 if effective.shadow is None else effective.shadow.sample_rate
        sequence.may_keep &= effective.kv_reuse is not None and sequence.request.kv_reuse
        if sequence.request.speculative and self._has_draft:
            sequence.speculative = effective.speculative
        sequence.picker = Picker(
            sequence.request,
            sequence.stream,
            self._model.vocabulary_tokens,
            acceptance_of(sequence.speculative, self._forward.embeddings),
            self._token_bytes,
        )
