"""The engine in this process, without a server.

A model that generates:

>>> from sixfold_runtime.sdk import InferenceEngine
>>> with InferenceEngine(chat, draft=chat_draft) as engine:
...     plain = engine.generate("To be, or not", max_tokens=12, temperature=0)
...     drafted = engine.speculate("To be, or not", max_tokens=12, temperature=0)
>>> plain.text == drafted.text
True
>>> plain.drafted, plain.completion_tokens, plain.finish_reason
(0, 12, 'length')

A model that classifies, prepared with exit heads and with slices for more tasks:

>>> with InferenceEngine(sentiment) as engine:
...     full = engine.classify("A film to remember.")
...     early = engine.early_exit(["A film to remember.", "I want my money back."])
...     words = engine.classify("The old dog ran home", task="pos").tokens
>>> full.exited, all(text.layers <= full.layers for text in early)
(False, True)
>>> [(word.text, word.start) for word in words]
[('The', 0), ('old', 4), ('dog', 8), ('ran', 12), ('home', 16)]
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack, overload

import msgspec

from sixfold_api.effective import effective
from sixfold_api.modes import LEVEL_FROM, MAX_LEVEL, Mode
from sixfold_api.runtime_config import ModelState, RuntimeConfig
from sixfold_runtime.engine.answer import Classification, Generation, GenerationStream, TokenLabel, classified
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.errors import ModelLoadError, RequestError
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Classify, Generate, Sampling
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.tokenizer import ModelTokenizer
from sixfold_runtime.gateway.words import words
from sixfold_runtime.sdk_options import MODEL, EngineOptions, RequestOptions, policy_of
from sixfold_runtime.settings import RuntimeSettings

__all__ = [
    "Classification",
    "EngineOptions",
    "Generation",
    "GenerationStream",
    "InferenceEngine",
    "ModelLoadError",
    "RequestError",
    "RequestOptions",
    "TokenLabel",
]

_MAX_TOKENS = 256
Texts = list[str] | tuple[str, ...]


class InferenceEngine:
    """One model. Any number of threads may ask it at once: their requests are computed together.

    What it does is what its config.json says: a causal language model generates, a sequence or token classifier
    classifies, and a bare trunk classifies through its task slices. A prompt is text, the messages of a chat, or
    token ids:

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

    def __init__(self, model: Path | str, **options: Unpack[EngineOptions]) -> None:
        """Load the model; takes seconds. `model` is its folder: safetensors, config.json, tokenizer.json.

        Raises:
            ModelLoadError: a folder can't be served.
            ValueError: an option that is unknown, out of range, or not for this kind of model.
        """
        self._folder = Path(model)
        self._spec, served = policy_of(self._folder, options)
        self._config = self._at(options.get("level", MAX_LEVEL))
        self.metrics = EngineMetrics(RuntimeSettings())
        self.metrics.config_applied(self._config)
        loaded = threading.Event()
        device = options.get("device", "auto")
        redis = options.get("redis_directory")
        self._engine = Engine(
            [served],
            lambda: self._config,
            self.metrics,
            device=device,
            redis_directory=None if redis is None else Path(redis),
            on_models=loaded.set,
        )
        self._engine.start()
        loaded.wait()
        self._model = self._engine.models[MODEL]
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

    @overload
    def classify(self, texts: str, task: str | None = None, top_k: int | None = None) -> Classification: ...
    @overload
    def classify(self, texts: Texts, task: str | None = None, top_k: int | None = None) -> list[Classification]: ...
    def classify(
        self, texts: str | Texts, task: str | None = None, top_k: int | None = None
    ) -> Classification | list[Classification]:
        """Label a text or several, through all layers.

        Args:
            task: the task slice to compute with; None is the model's own head.
            top_k: how many of the best labels to report; None is all. Not where tokens are labelled.

        Raises:
            RequestError: a text can't be served, or there is no such task; `message` says why.
            ValueError: this model generates, or an argument doesn't fit.
        """
        return self._classify(texts, task or "", top_k, early_exit=False)

    @overload
    def early_exit(self, texts: str, top_k: int | None = None) -> Classification: ...
    @overload
    def early_exit(self, texts: Texts, top_k: int | None = None) -> list[Classification]: ...
    def early_exit(self, texts: str | Texts, top_k: int | None = None) -> Classification | list[Classification]:
        """As `classify` by the model's own head, but a text leaves behind the first layer whose exit head is sure.

        Raises:
            RequestError, ValueError: as `classify`.
            ValueError: the model has no exit heads, or the level is too low for exits.
            ModelLoadError: it has some that can't be used.
        """
        classification = self._spec.classification
        if classification is not None and classification.early_exit is None:
            raise ValueError(
                f"early_exit() needs exit heads, and {self._folder} has none: `sixfold prepare --exit-heads` makes them"
            )
        self._need(Mode.EARLY_EXIT, "early exit is")
        return self._classify(texts, "", top_k, early_exit=True)

    def generate(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Generation:
        """Answer with plain decoding.

        Raises:
            RequestError: the request can't be served; `message` says why.
            ValueError: this model classifies, not exactly one prompt, an option that is unknown or of a wrong type, or
                messages that the chat template refuses.
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
        if self._spec.generation is not None and self._spec.generation.speculative is None:
            raise ValueError("speculate() needs a draft model: InferenceEngine(model, draft=FOLDER)")
        self._need(Mode.SPECULATIVE, "speculation is")
        return self._stream(True, prompt, options)

    def _need(self, mode: Mode, what_is: str) -> None:
        if self.level < LEVEL_FROM[mode]:
            raise ValueError(f"the level is {self.level}, and {what_is} on from level {LEVEL_FROM[mode]}")
        if reason := self._model.unsupported.get(mode):
            raise ModelLoadError(reason)

    def _classify(
        self, texts: str | Texts, task: str, top_k: int | None, early_exit: bool
    ) -> Classification | list[Classification]:
        if self._spec.classification is None:
            raise ValueError(f"{self._folder} generates: use generate()")
        many = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(text, str) for text in many):
            raise ValueError("texts should be a string or a list of strings")
        encodings = [self._facts.tokenizer.tokenizer.encode(text) for text in many]
        requests = [
            Classify(str(index), MODEL, encoding.ids, task=task, top_k=top_k, early_exit=early_exit)
            for index, encoding in enumerate(encodings)
        ]
        results = []
        for text, encoding, done in zip(many, encodings, classified(self._engine, requests), strict=True):
            if done.token_labels and top_k is not None:
                raise ValueError("top_k is for labels of texts, and this labels tokens: leave it out")
            labels = done.token_labels
            found = [
                TokenLabel(text[w.start : w.end], w.start, w.end, labels[w.token].label, labels[w.token].score)
                for w in (words(text, encoding) if labels else ())
            ]
            results.append(Classification.of(done, task, found))
        return results[0] if isinstance(texts, str) else results

    def _stream(self, speculative: bool, prompt: str | None, options: RequestOptions) -> GenerationStream:
        if self._spec.generation is None:
            raise ValueError(f"{self._folder} classifies: use classify()")
        if unknown := options.keys() - RequestOptions.__annotations__.keys():
            raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
        ids = self._token_ids(prompt, options.get("messages"), options.get("token_ids"))
        stop = options.get("stop", ())
        stops = ((stop,) if isinstance(stop, str) else tuple(stop)) + self._facts.stop_strings * ("messages" in options)
        try:
            sampling = msgspec.convert({"max_tokens": _MAX_TOKENS, **options, "stop": stops}, Sampling)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        request = Generate(
            id="0",
            model=MODEL,
            token_ids=ids,
            sampling=sampling,
            speculative=speculative,
            task=options.get("task") or "",
            conversation=options.get("conversation", ""),
            kv_reuse=options.get("kv_reuse", True),
        )
        return GenerationStream(self._engine, request)

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
        return RuntimeConfig(sequence=0, stable=effective(self._spec, level).config)


def _finished(stream: GenerationStream) -> Generation:
    for _ in stream:
        pass
    assert stream.result is not None, "a stream that ends without an error has a result"
    return stream.result
