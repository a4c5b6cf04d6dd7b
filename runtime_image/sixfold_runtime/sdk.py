"""The engine in this process, without a server.

>>> from sixfold_runtime.sdk import InferenceEngine
>>> with InferenceEngine(chat, draft=chat_draft) as engine:
...     plain = engine.generate("To be, or not", max_tokens=12, temperature=0)
...     drafted = engine.speculate("To be, or not", max_tokens=12, temperature=0)
>>> plain.text == drafted.text
True
>>> plain.drafted, plain.completion_tokens, plain.finish_reason
(0, 12, 'length')
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

import msgspec

from sixfold_api.effective import effective
from sixfold_api.generation import DraftLength, GenerationSpec, QuantizedSpec, SpeculativeSpec
from sixfold_api.modes import LEVEL_FROM, MAX_LEVEL, Mode
from sixfold_api.pods import VariantRef
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import Draft, ModelState, RuntimeConfig, ServedModel, WeightSet
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.engine.answer import Generation, GenerationStream
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.errors import ModelLoadError, RequestError
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Generate, Sampling
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.tokenizer import ModelTokenizer
from sixfold_runtime.settings import RuntimeSettings

__all__ = ["Generation", "GenerationStream", "InferenceEngine", "ModelLoadError", "RequestError", "RequestOptions"]

_MODEL, _QUANTIZED, _DRAFT = "model", "quantized", "draft"
_MAX_TOKENS = 256


class RequestOptions(TypedDict, total=False):
    """The prompt, where it isn't text, and how tokens are drawn: names and defaults of the public API."""

    messages: Sequence[Mapping[str, str]]
    """A chat: each with `role` and `content`."""
    token_ids: Sequence[int]
    """Of the model's own tokenizer, special tokens included."""
    max_tokens: int
    """Absent means 256; never beyond the context."""
    temperature: float
    """0 is greedy; absent means 1."""
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logprobs: int
    """Report each token's log-probability, and those of this many most likely ones."""


class InferenceEngine:
    """One model that generates. Any number of threads may ask it at once: their requests are computed together.

    A prompt is text, the messages of a chat, or token ids:

        >>> with InferenceEngine(chat) as engine:
        ...     text = engine.generate("HAMLET:", max_tokens=4, seed=1)
        ...     reply = engine.generate(messages=[{"role": "user", "content": "Who art thou?"}], max_tokens=4)
        ...     exact = engine.generate(token_ids=[1, 40, 41], max_tokens=4, temperature=0, logprobs=2)
        >>> text.completion_tokens <= 4, exact.prompt_tokens, len(exact.logprobs[0].top)
        (True, 3, 2)

    An answer can be read while it is computed; leaving the loop early needs a `close()`:

        >>> with InferenceEngine(chat) as engine:
        ...     stream = engine.generate_stream("HAMLET:", max_tokens=8, temperature=0)
        ...     pieces = list(stream)
        >>> "".join(pieces) == stream.result.text
        True
    """

    def __init__(
        self,
        model: Path | str,
        *,
        draft: Path | str | None = None,
        quantized: Path | str | None = None,
        device: str = "auto",
        level: int = MAX_LEVEL,
        num_tokens: int = 5,
        length: DraftLength = DraftLength.COST_MODEL,
        full_weights: FullWeights = FullWeights.AUTO,
    ) -> None:
        """Load the model; takes seconds.

        Args:
            model: its folder: safetensors, config.json, tokenizer.json.
            draft: folder of a much smaller model with the same tokenizer, for `speculate`.
            quantized: folder of the same model with quantised weights; they answer from level 1.
            device: auto, cpu or cuda.
            level: rollback level, as in a policy; it can be changed later.
            num_tokens: most tokens drafted at a time.
            length: how many tokens a draft proposes at a time.
            full_weights: whether full and quantised weights stay in memory together.

        Raises:
            ModelLoadError: a folder can't be served.
        """
        self._spec = GenerationSpec(
            variant_ref=VariantRef(name=_MODEL),
            quantized=QuantizedSpec(variant_ref=VariantRef(name=_QUANTIZED)) if quantized else None,
            speculative=SpeculativeSpec(draft_variant_ref=VariantRef(name=_DRAFT), num_tokens=num_tokens, length=length)
            if draft
            else None,
        )
        self._config = self._at(level)
        served = ServedModel(
            name=_MODEL,
            task=Task.GENERATION,
            path=str(model),
            quantized=WeightSet(name=_QUANTIZED, path=str(quantized)) if quantized else None,
            full_weights=full_weights,
            draft=Draft(name=_DRAFT, path=str(draft)) if draft else None,
        )
        self.metrics = EngineMetrics(RuntimeSettings())
        self.metrics.config_applied(self._config)
        loaded = threading.Event()
        self._engine = Engine([served], lambda: self._config, self.metrics, device=device, on_models=loaded.set)
        self._engine.start()
        loaded.wait()
        self._model = self._engine.models[_MODEL]
        if self._model.facts is None:
            self.close()
            raise ModelLoadError(self._model.error)
        self._facts = self._model.facts
        self._tokenizer = ModelTokenizer.from_json(self._facts.tokenizer.bundle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's thread; what still runs fails."""
        self._engine.stop()

    @property
    def level(self) -> int:
        """The rollback level; running requests keep the one at which they began."""
        return self._config.stable.level

    @level.setter
    def level(self, level: int) -> None:
        self._config = self._at(level)
        self.metrics.config_applied(self._config)
        self._engine.config_changed()

    @property
    def state(self) -> ModelState:
        """Which weights answer, and what is wrong with others."""
        return self._model.state

    def generate(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Generation:
        """Answer with plain decoding.

        Raises:
            RequestError: the request can't be served; `message` says why.
            ValueError: not exactly one prompt, an option that is unknown or of a wrong type, or messages that the chat
                template refuses.
        """
        return _finished(self.generate_stream(prompt, **options))

    def generate_stream(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> GenerationStream:
        """As `generate`, in pieces."""
        return self._stream(False, prompt, options)

    def speculate(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Generation:
        """Answer with speculative decoding (Leviathan et al., arXiv 2211.17192): the same distribution, in less time.

        Raises:
            RequestError, ValueError: as `generate`.
            ValueError: there is no draft model, or the level is too low for speculation.
            ModelLoadError: there is one that can't be used.
        """
        return _finished(self.speculate_stream(prompt, **options))

    def speculate_stream(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> GenerationStream:
        """As `speculate`, in pieces."""
        if self._spec.speculative is None:
            raise ValueError("speculate() needs a draft model: InferenceEngine(model, draft=FOLDER)")
        if self.level < LEVEL_FROM[Mode.SPECULATIVE]:
            raise ValueError(
                f"the level is {self.level}, and speculation is on from level {LEVEL_FROM[Mode.SPECULATIVE]}"
            )
        if reason := self._model.unsupported.get(Mode.SPECULATIVE):
            raise ModelLoadError(reason)
        return self._stream(True, prompt, options)

    def _stream(self, speculative: bool, prompt: str | None, options: RequestOptions) -> GenerationStream:
        if unknown := options.keys() - RequestOptions.__annotations__.keys():
            raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
        ids = self._token_ids(prompt, options.get("messages"), options.get("token_ids"))
        stop = options.get("stop", ())
        stops = ((stop,) if isinstance(stop, str) else tuple(stop)) + self._facts.stop_strings * ("messages" in options)
        try:
            sampling = msgspec.convert({"max_tokens": _MAX_TOKENS, **options, "stop": stops}, Sampling)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        return GenerationStream(self._engine, Generate("0", _MODEL, ids, sampling, speculative=speculative))

    def _token_ids(
        self, prompt: str | None, messages: Sequence[Mapping[str, str]] | None, token_ids: Sequence[int] | None
    ) -> list[int]:
        if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
            raise ValueError("give exactly one of prompt, messages and token_ids")
        if token_ids is not None:
            return [int(token) for token in token_ids]
        tokenizer = self._facts.tokenizer.tokenizer
        if prompt is not None:
            return tokenizer.encode(prompt).ids
        try:
            text = self._tokenizer.render([dict(message) for message in messages or ()])
        except ApiError as error:
            raise ValueError(error.message) from error
        return tokenizer.encode(text, add_special_tokens=False).ids  # the template has written them

    def _at(self, level: int) -> RuntimeConfig:
        if not 0 <= level <= MAX_LEVEL:
            raise ValueError(f"level is {level}, must be 0 to {MAX_LEVEL}")
        return RuntimeConfig(sequence=0, stable=effective(InferencePolicySpec(generation=self._spec), level).config)


def _finished(stream: GenerationStream) -> Generation:
    for _ in stream:
        pass
    assert stream.result is not None, "a stream that ends without an error has a result"
    return stream.result
