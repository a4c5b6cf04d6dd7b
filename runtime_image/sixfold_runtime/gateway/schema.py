"""Request bodies of the public API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from sixfold_runtime.engine.protocol import Sampling
from sixfold_runtime.gateway.errors import bad_request, from_validation
from sixfold_runtime.gateway.extra_fields import HARMLESS, HARMLESS_IN_MESSAGE, check_extra

MAX_PROMPTS = 16
MAX_INPUTS = 256
MAX_STOPS = 4
MAX_CHAT_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 5
"""Alternatives of a token, as OpenAI bounds them."""


class Body(BaseModel):
    """A strict JSON body: no number for a string, no string for a number."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises ApiError (400) with the field that is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from None

    def model_post_init(self, context: Any) -> None:
        check_extra(self.model_extra, HARMLESS)


TaskName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationBody(Body):
    """What both generation endpoints share."""

    default_tokens: ClassVar[int | None] = None
    """Most tokens to generate where the client doesn't say; None means up to the end of the context."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """The policy's name, or that of the variant."""
    stream: bool | None = False
    """Answer with server-sent events, one token or more each."""
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    """Most tokens to generate."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy; absent means 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus; absent means 1."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """The same seed and request give the same answer from the same engine configuration."""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Draw from this many most likely tokens only; 0, -1 or absent means all. vLLM's name."""
    frequency_penalty: Penalty | None = None
    """Taken from a token's logit once for each time that it occurs in the answer."""
    presence_penalty: Penalty | None = None
    """Taken from the logit of each token that occurs in the answer."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Above 1, tokens of prompt and answer become less likely; absent means 1. vLLM's name."""
    speculative: bool | None = True
    """False: plain decoding for this request, even where the policy speculates. Sixfold's own."""
    kv_cache_reuse: bool | None = True
    """False: neither look for keys and values of earlier requests nor keep those of this one. Sixfold's own."""
    task: TaskName | None = None
    """The task slice to compute with, as the header X-Task; absent means the model as it is. Sixfold's own."""
    stop: Any = ()
    """A string, or up to four: generation ends before the first of them."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: Any) -> tuple[str, ...]:
        stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
            raise ValueError("should be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"takes at most {MAX_STOPS} strings")
        if not all(0 < len(text) <= 256 for text in stops):
            raise ValueError("each string takes 1 to 256 characters")
        return tuple(stops)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is for stream: true only", "stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_tokens(self) -> int | None:
        """Most tokens to generate, where the client said so."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each token's log-probability; None where that isn't asked for."""
        return None

    def sampling(self, max_tokens: int, more_stops: tuple[str, ...] = ()) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            seed=self.seed,
            stop=tuple(dict.fromkeys((*self.stop, *more_stops))),
            top_k=max(0, self.top_k or 0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            logprobs=self.alternatives,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str = ""


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    """Text, or a list of parts of type `text`."""
    name: str | None = None

    def for_template(self, index: int) -> dict[str, str]:
        """Role, content and name for the chat template; raises ApiError on what a text model can't read."""
        check_extra(self.model_extra, HARMLESS_IN_MESSAGE, f"messages.{index}.")
        content = self.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text":
                    raise bad_request(
                        f"content of type {part.type!r} is not supported: this model reads text only",
                        f"messages.{index}.content",
                        "unsupported_content",
                    )
                check_extra(part.model_extra, {}, f"messages.{index}.content.")
            content = "".join(part.text for part in content)
        if content is None and self.role != "assistant":
            raise bad_request(f"messages.{index} has no content", f"messages.{index}.content")
        # OpenAI's newer models call the system prompt `developer`; chat templates know it by the older name.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content or ""} | ({"name": self.name} if self.name else {})


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = False
    """Report each token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    """With logprobs: true, also report those of this many most likely tokens."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs is for logprobs: true only", "top_logprobs")

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ: send one of them", "max_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Prompt = str | list[int]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    default_tokens: ClassVar[int | None] = 16
    """As in OpenAI's API."""
    prompt: Any
    """A string, a list of token ids, or a list of up to 16 of either: each gives a choice."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    """Report each token's log-probability, and those of this many most likely tokens."""

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[Prompt]:
        """Raises ApiError where the field is none of the four forms, empty, or too long."""
        prompt = self.prompt
        many = [prompt] if isinstance(prompt, str) or _is_token_ids(prompt) else prompt
        if not isinstance(many, list) or not many:
            raise bad_request("prompt should be text, token ids, or a list of either", "prompt")
        if len(many) > MAX_PROMPTS:
            raise bad_request(f"a request takes at most {MAX_PROMPTS} prompts", "prompt")
        for index, one in enumerate(many):
            if not (isinstance(one, str) or _is_token_ids(one)):
                raise bad_request(f"prompt.{index} should be text or token ids", f"prompt.{index}")
            if not one:
                raise bad_request("the prompt is empty", "prompt")
        return many


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class ClassifyBody(Body):
    """POST /v1/classify."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """The policy's name (also when absent), or that of the variant."""
    input: Any
    """A text, or a list of up to 256."""
    task: TaskName | None = None
    """The task slice to compute with, as the header X-Task; absent means the model's own head."""
    top_k: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """How many of the best labels of a text to return; absent means all. Not for tasks that label tokens."""
    early_exit: bool | None = True
    """False: this request runs through all layers, even where texts may exit early."""

    def inputs(self) -> list[str]:
        """Raises ApiError where the field is neither text nor a list of it, empty, or too long."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise bad_request("input should be a text that is not empty, or a list of such", "input")
        if len(texts) > MAX_INPUTS:
            raise bad_request(f"a request takes at most {MAX_INPUTS} texts", "input")
        return texts
