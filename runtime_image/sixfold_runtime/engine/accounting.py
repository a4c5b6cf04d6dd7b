"""What the requests of a runner cost: each forward's operations and seconds, divided among its rows.

A step adds a few numbers to each row's account (`waste_account.py`); what is looked up by labels is looked up once a
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf

from sixfold_api.runtime_config import KVReuseConfig
from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.lane import Flight
from sixfold_runtime.engine.picker import Picked
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.engine.waste_metrics import FlopsMetrics
from sixfold_runtime.modes.kv_reuse import Scope, chain
from sixfold_runtime.waste_blocks import SeenBlocks

_BLOCK_TOKENS = 32
"""What a policy gets that doesn't say otherwise: the size of the blocks that would be reused if the mode were on."""


class Accounting:
    """Used from the engine's thread."""

    def __init__(
        self,
        forward: Forward,
        variant: str,
        metrics: FlopsMetrics,
        clock: Callable[[], float],
        *,
        can_reuse: bool = True,
    ) -> None:
        """`can_reuse`: whether keys and values of this model can be used by other prompts at all."""
        self._can_reuse = can_reuse
        self._forward, self._variant, self._metrics, self._clock = forward, variant, metrics, clock
        self._token, self._pair, self._output = forward.flops.unit_costs
        self._position = self._token + self._output
        self._seen = SeenBlocks()
        self._charged_seconds = 0.0
        """Until when the step's time is charged."""

    # -- seconds

    def step_begins(self) -> None:
        self._charged_seconds = self._clock()

    def charge(self, sequences: ListOf[Sequence]) -> None:
        """Whatever was done since the last charge was done for these alike."""
        seconds = self._uncharged()
        if sequences:
            share = seconds / len(sequences)
            for sequence in sequences:
                sequence.account.engine_seconds += share

    def charge_by_tokens(self, sequences: ListOf[Sequence], counts: ListOf[int]) -> None:
        """As `charge`, in proportion to their tokens."""
        a_token = self._uncharged() / sum(counts)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.account.engine_seconds += count * a_token

    def _uncharged(self) -> float:
        before, self._charged_seconds = self._charged_seconds, self._clock()
        return self._charged_seconds - before

    # -- operations

    def prefilled(self, sequences: ListOf[Sequence], starts: ListOf[int], counts: ListOf[int]) -> None:
        """The last forward computed so many tokens of each prompt, from `starts` on."""
        for sequence, start, count, spent in zip(sequences, starts, counts, self._forward.spent, strict=True):
            sequence.account.prefill(self._token, self._pair, self._output, start, count, spent)

    def launched(self, flight: Flight) -> None:
        """The last forward was this step's."""
        for (sequence, context), spent in zip(flight.contexts.items(), self._forward.spent, strict=True):
            drafted = len(flight.drafts[sequence].tokens) if sequence in flight.drafts else 0
            sequence.account.decode(self._position, self._pair, context, drafted, spent)

    def landed(self, flight: Flight, picked: ListOf[Picked]) -> None:
        """It is known what came of a step and its drafts. Rows that ended meanwhile were counted then."""
        self.charge(flight.sequences)
        if not flight.drafts:
            return
        for sequence, result in zip(flight.sequences, picked, strict=True):
            draft = flight.drafts.get(sequence)
            if draft is not None and not sequence.is_cancelled:
                drafted, context = len(draft.tokens), flight.contexts[sequence]
                sequence.account.settle(self._position, self._pair, context, drafted, result.accepted)

    def ended(self, sequence: Sequence, is_cancelled: bool) -> None:
        for flops, cause, estimated in sequence.account.totals(is_cancelled):
            self._metrics.add(sequence.level, sequence.arm, flops, cause, estimated=estimated)

    # -- beginnings of prompts

    def begins(self, sequence: Sequence, config: KVReuseConfig | None) -> None:
        """Find out how much of its prompt was computed before.

        Args:
            config: by which it may reuse keys and values; None: the mode is off for it.
        """
        account = sequence.account
        if not (self._can_reuse and sequence.request.kv_reuse):
            return
        account.block_tokens = _BLOCK_TOKENS if config is None else config.block_tokens
        if account.is_lookup_worth_it:
            # As a lookup has it: at least one token remains to be computed.
            found = self._seen.leading(self._names(sequence, len(sequence.context) - 1))
            account.seen_tokens, account.is_estimated = found * account.block_tokens, config is None

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Its answer is complete; `tokens` of its context have keys and values."""
        if sequence.account.block_tokens:
            self._seen.remember(self._names(sequence, tokens), sequence.request.tenant)

    def forget(self, tenant: str, running: Iterable[Sequence]) -> None:
        """What was computed for a tenant, and is being computed in these."""
        self._seen.forget(tenant)
        for sequence in running:
            sequence.account.block_tokens = 0

    def _names(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """Of the whole blocks among the first tokens of its context. As the real ones they are a tenant's own, and a
        task's; the weights are this runner's."""
        task_slice = sequence.task_slice
        scope = Scope(
            weights_digest=self._variant,
            variant=self._variant,
            salt=sequence.request.tenant,
            layers=0,
            kv_heads=0,
            head_dim=0,
            dtype="",
            block_tokens=sequence.account.block_tokens,
            task="" if task_slice is None else task_slice.name,
            task_digest="" if task_slice is None else task_slice.digest,
        )
        return chain(scope, sequence.context[:tokens])
