"""The wire between gateway and engine: `sixfold.engine.v1`, msgpack messages over one WebSocket a pair.

The gateway connects to `ws://<engine>/engine`, subprotocol `sixfold.engine.v1`. Every frame holds one message.

    gateway -> engine   Submit (a batch of requests), Cancel, Prefetch, Erase
    engine  -> gateway  State (on connection and after each change), Step (all streams of a step), Done, Erased

A request is answered by any number of `Chunk`s in `Step`s and exactly one `Done`, unless the gateway cancelled it.
The first chunk of a request carries the level that the engine stamped at admission.
Fields are only ever added, each with a default, so that gateway and engine may be one release apart.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

SUBPROTOCOL = "sixfold.engine.v1"
PATH = "/engine"
T = TypeVar("T")


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn and when generation ends."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Stop strings; none of them ever reaches the client."""
    top_k: int = 0
    """Draw from the k most likely tokens only; 0 is all."""
    repetition_penalty: float = 1.0
    """Divides the logits above 0 of tokens that occur in prompt or answer, and multiplies those below."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that it occurs in the answer."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that occurs in the answer."""
    logprobs: int | None = None
    """Report each token's log-probability, and those of this many alternatives."""


class Generate(msgspec.Struct, frozen=True, omit_defaults=True, tag="generate"):
    """One prompt to continue. `token_ids` are the target tokenizer's, special tokens included."""

    id: str
    model: str
    token_ids: list[int]
    sampling: Sampling
    tenant: str = ""
    arm: str = "stable"
    speculative: bool = True
    """False: plain decoding for this request, whatever the level."""
    task: str = ""
    """The task slice to compute with; "" is the trunk as it is."""
    conversation: str = ""
    """What the client calls the conversation; a hint where keys and values may be found, never a key to them."""
    kv_reuse: bool = True
    """False: neither look for keys and values of an earlier request nor keep those of this one."""
    traceparent: str = ""
    """W3C trace context of who asks; "" for a request that isn't traced."""


class Classify(msgspec.Struct, frozen=True, omit_defaults=True, tag="classify"):
    """One text to label in one forward pass."""

    id: str
    model: str
    token_ids: list[int]
    tenant: str = ""
    arm: str = "stable"
    task: str = ""
    """The task slice to compute with; "" is the model's own head."""
    top_k: int | None = None
    """Report this many labels, the likeliest; None is all."""
    early_exit: bool = True
    """False: through all layers, whatever the level."""
    traceparent: str = ""
    """W3C trace context of who asks; "" for a request that isn't traced."""


Request = Generate | Classify


class Submit(msgspec.Struct, frozen=True, omit_defaults=True, tag="submit"):
    requests: list[Request]
    swap_turns: list[str] = []
    """Models whose weights this engine may exchange now: no other engine is in the middle of that."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop these within one step; no Done follows."""

    ids: list[str]


class Prefetch(msgspec.Struct, frozen=True, omit_defaults=True, tag="prefetch"):
    """A request of this conversation is on its way: bring what was kept of it near. Never answered."""

    model: str
    tenant: str
    conversation: str


class Erase(msgspec.Struct, frozen=True, omit_defaults=True, tag="erase"):
    """Forget all keys and values that were kept for a tenant; answered by one Erased."""

    id: str
    tenant: str


class Erased(msgspec.Struct, frozen=True, omit_defaults=True, tag="erased"):
    id: str
    blocks: int = 0
    """Found and removed."""
    error: str = ""
    """Why some may be left."""


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The log-probability of a token under the model, before penalties, temperature and cuts."""

    token_id: int
    logprob: float
    token: bytes = b""
    """The token's own bytes, which need not be whole characters."""
    top: list[TokenLogprob] = []
    """The most likely tokens in its place, best first; empty inside of this list."""


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step added to one stream. `text` is whole characters and never part of a stop string."""

    id: str
    text: str = ""
    tokens: int = 0
    """Tokens that this step added, also when their text is still held back."""
    level: int | None = None
    """Rollback level at admission; in the first chunk only."""
    logprobs: list[TokenLogprob] = []
    """Of the tokens that this step added, if they were asked for."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    chunks: list[Chunk]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


SWAPPING = "engine_swapping"
"""Code of a Failure: the queue for other weights is full. Another engine may have room."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request failed: an HTTP status, a word for machines, a sentence for people."""

    status: int
    code: str
    message: str
    retry_after_seconds: float | None = None
    """When another try may do, where the engine has an idea."""


class LabelScore(msgspec.Struct, frozen=True):
    label: str
    score: float


class Done(msgspec.Struct, frozen=True, omit_defaults=True, tag="done"):
    """The end of a request."""

    id: str
    finish_reason: FinishReason
    level: int
    """Rollback level at admission."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    scores: list[LabelScore] = []
    """A classification's labels, best first; softmax over all labels."""
    token_labels: list[LabelScore] = []
    """A token classification's best label of each token id, special tokens included."""
    layers: int | None = None
    """Layers that a classified text ran through."""
    exited: bool = False
    """Whether it left before the last one."""
    failure: Failure | None = None
    drafted_tokens: int = 0
    """Tokens that a draft model proposed for this request."""
    accepted_tokens: int = 0
    """Tokens among them that the target accepted and the answer holds."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were found instead of computed."""
    engine_seconds: float = 0.0
    """Of the engine's time, this request's share: of each forward that it was computed in."""
    queued_seconds: float = 0.0
    """From its arrival here until it began."""


class TaskInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task slice that a model offers."""

    name: str
    task: str
    """Classification, TokenClassification or Generation."""
    labels: list[str] = []


class ModelInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that an engine serves, as a gateway needs to know it."""

    name: str
    task: str
    context_tokens: int
    tokenizer: str
    """SHA-256 (hex) of the tokenizer bundle: GET /tokenizer/<sha256> on the engine returns it."""
    ready: bool = True
    stop: tuple[str, ...] = ()
    """Stop strings from the model's generation_config.json: they end every chat turn."""
    swapping: bool = False
    """Its weights are being exchanged: new requests wait, so another engine is the better choice."""
    swap_pending: bool = False
    """Its weights have to be exchanged, and it waits for its turn."""
    labels: list[str] = []
    """Of a classifier's own head; none where it has only tasks."""
    tasks: list[TaskInfo] = []
    kv_block_tokens: int = 0
    """Tokens of a block of keys and values that this engine keeps; 0 where it keeps none now."""


class MissingModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that an engine is there for and does not serve."""

    name: str
    task: str
    failed: bool = False
    """It can't be loaded; else it is being loaded."""


class State(msgspec.Struct, frozen=True, omit_defaults=True, tag="state"):
    """What an engine is and does."""

    pod: str
    models: list[ModelInfo]
    sequence: int
    level: int
    running: int = 0
    waiting: int = 0
    draining: bool = False
    """The engine takes no new work: it is about to stop."""
    missing: list[MissingModel] = []


ToEngine = Submit | Cancel | Prefetch | Erase
ToGateway = State | Step | Done | Erased

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_gateway = msgspec.msgpack.Decoder(ToGateway)


class TokenizerBundle(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of GET /tokenizer/<sha256>, as JSON: all that a gateway needs to tokenise like the engine."""

    tokenizer_json: str
    chat_template: str = ""
    special_tokens: dict[str, str] = {}
    """Such as bos_token and eos_token, for the chat template."""
    vocabulary_tokens: int = 0


def encode(message: ToEngine | ToGateway) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises msgspec.DecodeError (a ValidationError is one) on a malformed frame."""
    return _decoded(_to_engine, frame)


def decode_to_gateway(frame: bytes) -> ToGateway:
    """Raises msgspec.DecodeError (a ValidationError is one) on a malformed frame."""
    return _decoded(_to_gateway, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except RecursionError:  # a field that nobody knows may hold anything
        raise msgspec.DecodeError("nested too deeply") from None
