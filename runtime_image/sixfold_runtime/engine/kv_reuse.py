"""Keys and values of one set of weights: which may be used again, when looking for them pays, and what is kept.

The decisions are in `modes/kv_reuse.py`, the blocks in `kv_store.py`; here they meet caches and requests. A fault of
reuse costs time, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import torch

from sixfold_api.runtime_config import KVReuseConfig, RuntimeConfig
from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.kv_cache import KVCache
from sixfold_runtime.engine.kv_shelf import Shelf
from sixfold_runtime.engine.kv_store import Lookup
from sixfold_runtime.engine.kv_writer import QUEUE_BYTES
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.rotary import STATIC_KINDS
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.weight_files import ContentDigest
from sixfold_runtime.engine.work import CurrentConfig
from sixfold_runtime.modes.kv_reuse import ReuseCosts, Scope

log = logging.getLogger(__name__)
_DIGESTING = "the digest of the weights is still being computed: keys and values are reused from then on"
_PIECE_BYTES = 64 * 2**20
"""Of an answer's keys and values, copied at a time: a large model has half a megabyte a token."""
_MEANWHILE = "keys and values in this pod's memory are reused meanwhile"


@dataclass(frozen=True)
class KVShape:
    """Of the keys of one token, which are like the values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values."""
        item_bytes: int = getattr(torch, self.dtype).itemsize
        return 2 * self.layers * self.kv_heads * self.head_dim * item_bytes


class KVReuse:
    """Used from the engine's thread; what it says about itself may be read from any.

    Attributes:
        shape: None where there can't be any reuse.
        wake: called in another thread when a request that waits may go on.
    """

    def __init__(
        self,
        shelf: Shelf,
        digest: ContentDigest,
        model: LoadedModel,
        forward: Forward,
        config: CurrentConfig,
        wake: Callable[[], None],
    ) -> None:
        """Runs a first forward. `digest` is of the model's weights."""
        self.wake = wake
        self._shelf, self._digest, self._config = shelf, digest, config
        self._variant, self._kernel = model.served.name, forward.kernel
        self._costs = ReuseCosts()
        found = why_not(model) or _shape(forward)
        self.shape = found if isinstance(found, KVShape) else None
        self._why_never = found if isinstance(found, str) else ""

    @property
    def config(self) -> KVReuseConfig | None:
        """None while the mode is off in both arms."""
        return kv_reuse_in_use(self._config())

    def is_on(self, arm: str) -> bool:
        """Whether requests of an arm reuse keys and values now."""
        return self._config().of(arm).kv_reuse is not None

    @property
    def problem(self) -> str:
        """For people: why nothing is reused, or less than the configuration says; "" where all is well."""
        if self._why_never or self._digest.problem:
            return self._why_never or f"keys and values can't be reused: {self._digest.problem}"
        if not self._digest.value:
            return _DIGESTING
        return f"{problem}; {_MEANWHILE}" if (problem := self._shelf.store.problem) else ""

    @property
    def block_tokens(self) -> int:
        """Of a block; 0 while none are kept."""
        config = self.config
        return 0 if config is None or self.shape is None or not self._digest.value else config.block_tokens

    def adapt(self) -> None:
        """Follow the configuration: the digest is computed when the mode is first on."""
        if self.config is not None and self.shape is not None:
            self._digest.want()

    # -- before a prompt is computed

    def wanted(self, sequence: Sequence) -> Scope | None:
        """Where to look for the keys and values of a prompt; None where that isn't possible or doesn't pay."""
        config, request = self.config, sequence.request
        if config is None or not request.kv_reuse or not self.is_on(request.arm):
            return None
        scope, tokens = self._scope(sequence, config), len(request.token_ids)
        if scope is None or self._costs.wants(tokens, config.block_tokens, config.min_prompt_tokens):
            return scope
        self._shelf.store.skip(scope, request.token_ids)
        sequence.account.is_lookup_worth_it = False
        return None

    def find(self, sequence: Sequence, scope: Scope, wake: Callable[[], None]) -> Lookup | None:
        """Begin to look; `wake` is called in another thread when that is done. None: nothing will be found."""
        try:
            return self._shelf.store.find(scope, sequence.request.token_ids, wake)
        except Exception:
            log.exception("model %s: keys and values can't be looked up", self._variant)
            return None

    def looked_up(self, found_tokens: int, seconds: float) -> None:
        """A lookup held a request up for so long."""
        self._costs.observe_lookup(found_tokens, seconds)

    def computed(self, sequences: ListOf[Sequence], seconds: float) -> None:
        """These prompts were computed in this time."""
        # One whose beginning was found says little: what an operation costs at least weighs more in it.
        if not any(sequence.cached_tokens for sequence in sequences):
            self._costs.observe_prefill(sum(len(sequence.request.token_ids) for sequence in sequences), seconds)
            if (config := self.config) is not None:
                self._shelf.metrics.least_tokens(self._variant, self._least_tokens(config))

    # -- when an answer is complete

    def keep(self, sequence: Sequence, cache: KVCache, row: int, tokens: int) -> None:
        """Keep the whole blocks among the first `tokens` of a sequence's context that aren't known yet."""
        config = self.config
        if config is None or not sequence.may_keep:
            return
        try:
            self._keep(sequence, cache, row, tokens, config)
        except Exception:
            log.exception("model %s: keys and values of an answer can't be kept", self._variant)

    def _keep(self, sequence: Sequence, cache: KVCache, row: int, tokens: int, config: KVReuseConfig) -> None:
        scope = self._scope(sequence, config)
        # The next prompt of a conversation is longer than this one with its answer.
        if scope is None or len(sequence.context) < self._least_tokens(config):
            return
        store, block = self._shelf.store, config.block_tokens
        token_ids = sequence.context[: tokens // block * block]
        known = max(store.known_tokens(scope, token_ids), sequence.cached_tokens // block * block)
        for start, end in self._pieces(known, len(token_ids), block):
            keys, values, ready = _on_host(*cache.read(row, start, end))
            store.keep(scope, token_ids[:end], start, keys, values, sequence.request.conversation, ready)

    def _pieces(self, start: int, end: int, block_tokens: int) -> Iterator[tuple[int, int]]:
        """Tokens to copy at a time: whole blocks, so many that copying takes little memory, and not more in all than
        the store takes. The rest of a long answer is kept after the next one of its conversation."""
        assert self.shape is not None
        blocks = _PIECE_BYTES // (block_tokens * self.shape.bytes_per_token)
        step = max(1, blocks) * block_tokens
        end = min(end, start + QUEUE_BYTES // _PIECE_BYTES * step)
        yield from ((first, min(first + step, end)) for first in range(start, end, step))

    def _least_tokens(self, config: KVReuseConfig) -> int:
        return config.min_prompt_tokens or self._costs.least_tokens(config.block_tokens)

    # -- names

    def prefetch(self, tenant: str, conversation: str) -> None:
        """A request of this conversation is on its way."""
        config = self.config
        if config is not None and (scope := self.scope(tenant, config)) is not None:
            self._shelf.store.prefetch(scope, conversation)

    def _scope(self, sequence: Sequence, config: KVReuseConfig) -> Scope | None:
        task_slice = sequence.task_slice
        task = ("", "") if task_slice is None else (task_slice.name, task_slice.digest)
        return self.scope(sequence.request.tenant, config, *task)

    def scope(self, tenant: str, config: KVReuseConfig, task: str = "", task_digest: str = "") -> Scope | None:
        """What is shared, and with whom; None while that can't be told."""
        shape, digest = self.shape, self._digest.value
        if shape is None or not digest:
            return None
        return Scope(
            # Kernels order a head's components in ways of their own.
            weights_digest=f"{digest} {self._kernel}",
            variant=self._variant,
            salt=self._shelf.salt(tenant),
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            block_tokens=config.block_tokens,
            task=task,
            task_digest=task_digest,
        )


def kv_reuse_in_use(config: RuntimeConfig) -> KVReuseConfig | None:
    """Where blocks are, and how large: the stable arm's word, or the canary's where it alone has the mode on."""
    if config.stable.kv_reuse is None and config.canary is not None:
        return config.canary.config.kv_reuse
    return config.stable.kv_reuse


def why_not(model: LoadedModel) -> str:
    """Why a model's keys and values can't be used by other prompts that begin alike; "" where they can."""
    if model.module is None:
        return ""
    rope = getattr(model.module.config.get_text_config(), "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    sets = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {part["rope_type"] for part in sets if part.get("rope_type")} - STATIC_KINDS
    return f"its positions ({', '.join(sorted(kinds))}) depend on the length of the prompt" if kinds else ""


def _shape(forward: Forward) -> KVShape | str:
    """A text where there is none: why."""
    cache = forward.new_cache(1)
    forward([[0]], cache)
    try:
        keys, values = cache.read(0, 0, 1)
    except ValueError as error:
        return str(error)
    if keys.shape != values.shape:
        return f"its keys {tuple(keys.shape)} and values {tuple(values.shape)} have different shapes"
    layers, kv_heads, _, head_dim = keys.shape
    return KVShape(layers, kv_heads, head_dim, str(keys.dtype).removeprefix("torch."))


def _on_host(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]:
    """Copies in the host's memory, and when they are there; the device is not waited for."""
    if keys.device.type != "cuda":
        return keys, values, None
    pinned = [torch.empty(plane.shape, dtype=plane.dtype, pin_memory=True) for plane in (keys, values)]
    for host, plane in zip(pinned, (keys, values), strict=True):
        host.copy_(plane, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(keys.device))
    return pinned[0], pinned[1], ready
