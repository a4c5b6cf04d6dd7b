"""The draft model's side of a lane: it proposes the next tokens of each sequence, one cheap forward after another.

Its KV cache has rows of its own. A sequence gets one when tokens are first drafted for it, and its row may lag behind
while nothing is drafted: what the draft hasn't seen is fed before it proposes again. Whatever goes wrong here costs
time only: the target verifies every token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from sixfold_runtime.engine.forward import Forward
from sixfold_runtime.engine.kv_cache import KVCache
from sixfold_runtime.engine.picker import Draft
from sixfold_runtime.engine.sequence import Sequence
from sixfold_runtime.modes.acceptance import Distribution

NO_DRAFT = Draft((), ())
_ALONE_TOKENS = 8
"""A row that lags by more catches up alone, so that the others aren't padded to its length."""
_CHUNK_TOKENS = 256


class Drafter:
    """Proposes tokens. Used from the engine's thread."""

    def __init__(self, forward: Forward, context_tokens: int, vocabulary_tokens: int) -> None:
        """
        Args:
            context_tokens: longest context of the draft model.
            vocabulary_tokens: ids of the target: what the draft's padded rows offer beyond them is never proposed.
        """
        self._forward = forward
        self._context_tokens = context_tokens
        self._vocabulary_tokens = vocabulary_tokens
        self._rows: list[Sequence] = []
        self._cache = forward.new_cache()
        self._broken: set[Sequence] = set()
        self._fed_tokens = 0
        """Drafted tokens of the last proposal that the cache holds, at most."""

    @property
    def kv_bytes(self) -> int:
        return self._cache.allocated_bytes

    @property
    def kv_used_bytes(self) -> int:
        return self._cache.used_bytes

    def reach_tokens(self, sequence: Sequence) -> int:
        """How many tokens could be drafted at most: less where the draft's context ends, none if it failed before."""
        if sequence in self._broken:
            return 0
        return max(0, self._context_tokens - len(sequence.context))

    def lag_tokens(self, sequence: Sequence) -> int:
        """Tokens that would have to be fed before anything is drafted; 1 or 2 while it drafts in every step."""
        held = self._cache.lengths[self._rows.index(sequence)] if sequence in self._rows else 0
        return len(sequence.context) - held

    def propose(self, lengths: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        """Draft up to lengths[s] > 0 tokens for each sequence s, all rows together."""
        self._seat(lengths)
        self._catch_up()
        for sequence in self._rows:
            sequence.account.draft()
        tokens: list[list[int]] = [[] for _ in self._rows]
        distributions: list[list[Distribution]] = [[] for _ in self._rows]
        wanted = [lengths.get(sequence, 0) for sequence in self._rows]
        feed = [self._unseen(row) for row in range(len(self._rows))]
        self._fed_tokens = max(wanted) - 1
        for _ in range(max(wanted)):
            logits = self._forward(feed, self._cache)[:, : self._vocabulary_tokens].cpu().numpy()
            best = logits.argmax(axis=1).tolist()  # of a row with NaN, where the first one is
            for row, sequence in enumerate(self._rows):
                if not math.isfinite(logits[row, best[row]]):
                    self._broken.add(sequence)
                    wanted[row] = len(tokens[row])
                spent = self._forward.spent[row]
                if len(tokens[row]) < wanted[row]:
                    sequence.account.drafted.append(spent)
                    if sequence.picker.is_plain_greedy:
                        tokens[row].append(best[row])
                        continue
                    token, distribution = sequence.picker.propose(logits[row], tokens[row])
                    tokens[row].append(token)
                    if distribution is not None:
                        distributions[row].append(distribution)
                else:
                    sequence.account.padding += spent
            # A row that needs no more tokens goes on with its last one; what that writes is rolled back.
            feed = [[drafted[-1] if drafted else feed[row][-1]] for row, drafted in enumerate(tokens)]
        return {
            sequence: Draft(tuple(drafted), tuple(drawn_from))
            for sequence, drafted, drawn_from in zip(self._rows, tokens, distributions, strict=True)
        }

    def settle(self, contexts: Mapping[Sequence, int], accepted: Mapping[Sequence, int]) -> None:
        """Forget rejected tokens.

        Args:
            contexts: tokens of each context when tokens were drafted for it.
            accepted: how many of them the target accepted.
        """
        self._cache.truncate(
            [
                contexts[sequence] + min(accepted.get(sequence, 0), self._fed_tokens)
                if sequence in contexts
                else self._cache.lengths[row]
                for row, sequence in enumerate(self._rows)
            ]
        )

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence; an unknown one is ignored."""
        self._broken.discard(sequence)
        if sequence in self._rows:
            self._unseat(self._rows.index(sequence))

    def clear(self) -> None:
        """Forget all sequences and free the memory."""
        self._rows.clear()
        self._broken.clear()
        self._cache.clear()

    def _seat(self, sequences: Mapping[Sequence, int]) -> None:
        """Rows for those that tokens are drafted for; the rows of others are given up, since they'd be computed too."""
        for sequence in [seated for seated in self._rows if seated not in sequences]:
            self._unseat(self._rows.index(sequence))
        for sequence in sequences:
            if sequence not in self._rows:
                self._move_in(self._forward.new_cache(1), sequence)

    def _move_in(self, alone: KVCache, sequence: Sequence) -> None:
        """Feed a row of its own all that the draft hasn't seen but the last token, and append it."""
        unseen = sequence.context[alone.lengths[0] : -1]
        for start in range(0, len(unseen), _CHUNK_TOKENS):
            self._forward([unseen[start : start + _CHUNK_TOKENS]], alone)
            sequence.account.useful += self._forward.spent[0]
        self._cache.append(alone, 0)
        self._rows.append(sequence)

    def _catch_up(self) -> None:
        for sequence in [s for s in self._rows if self.lag_tokens(s) > _ALONE_TOKENS]:
            alone = self._forward.new_cache()
            alone.append(self._cache, self._rows.index(sequence))
            self._unseat(self._rows.index(sequence))
            self._move_in(alone, sequence)

    def _unseat(self, row: int) -> None:
        """As the cache does it: the last row takes the place."""
        self._cache.remove(row)
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def _unseen(self, row: int) -> list[int]:
        return self._rows[row].context[self._cache.lengths[row] :]
