"""One request on its way through generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from sixfold_api.runtime_config import STABLE, SpeculativeConfig
from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.kv_store import Prefix
from sixfold_runtime.engine.picker import Picked, Picker
from sixfold_runtime.engine.protocol import Chunk, Done, FinishReason, Generate
from sixfold_runtime.engine.scheduler import Entry
from sixfold_runtime.engine.stream import OutputStream
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.engine.work import Key, failed
from sixfold_runtime.waste_account import Account


@dataclass(eq=False)
class Sequence:
    """A request, its tokens so far, and what was stamped on it when it began. Compared by identity."""

    key: Key
    request: Generate
    stream: OutputStream
    max_tokens: int
    arrived_seconds: float
    level: int
    """The current one of its arm until the first step, then it stays."""
    context: list[int]
    """Prompt and answer; the last token isn't in the KV cache yet."""
    picker: Picker = field(init=False)
    """Made when the request begins."""
    arm: str = STABLE
    """That it runs in; as `level`."""
    shadow_rate: float = 0.0
    """Share of answers like this one that are computed again; as `level`."""
    speculative: SpeculativeConfig | None = None
    """How tokens are drafted for it; None is plain decoding."""
    task_slice: TaskSlice | None = None
    """Held from admission to the end; None is the trunk as it is."""
    prefix: Prefix | None = None
    """Keys and values that were found for it, until its prompt is computed."""
    cached_tokens: int = 0
    """Of the prompt, that were found."""
    may_keep: bool = True
    """False: its keys and values aren't kept for later requests when its answer is complete."""
    level_sent: bool = False
    queued_seconds: float = 0.0
    """From its arrival until it began."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    account: Account = field(default_factory=Account)
    is_cancelled: bool = False
    """Forgotten while its tokens are being picked: its row goes when they are."""

    @property
    def entry(self) -> Entry[Key]:
        """As the scheduler sees it before it begins."""
        prompt_tokens = len(self.context)
        return Entry(self.key, prompt_tokens - self.cached_tokens, prompt_tokens + self.max_tokens)

    def take_prefix(self, prefix: Prefix | None) -> None:
        """What was found for it, instead of what was found before; nothing is None. Before it begins."""
        self.prefix, self.cached_tokens = prefix, 0 if prefix is None else prefix.tokens

    @property
    def room_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.stream.tokens

    def add(self, picked: Picked) -> Chunk:
        """Take what was picked; what the client is told of it."""
        self.context += picked.tokens
        self.accepted_tokens += picked.accepted
        level = None if self.level_sent else self.level
        self.level_sent = True
        return Chunk(
            id=self.request.id,
            text=picked.text,
            tokens=len(picked.tokens),
            level=level,
            logprobs=list(picked.logprobs),
        )

    def done(self, reason: FinishReason) -> Done:
        return Done(
            id=self.request.id,
            finish_reason=reason,
            level=self.level,
            prompt_tokens=len(self.request.token_ids),
            completion_tokens=self.stream.tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            cached_tokens=self.cached_tokens,
            engine_seconds=self.account.engine_seconds,
            queued_seconds=self.queued_seconds,
        )

    def failed(self, error: RequestError) -> Done:
        done = failed(self.request.id, self.level, error, len(self.request.token_ids), self.stream.tokens)
        return replace(done, engine_seconds=self.account.engine_seconds, queued_seconds=self.queued_seconds)


def slices_of(sequences: Iterable[Sequence]) -> list[TaskSlice | None] | None:
    """What a forward of these rows takes; None where no row has a slice, so that it needn't look."""
    slices = [sequence.task_slice for sequence in sequences]
    return slices if any(slices) else None
