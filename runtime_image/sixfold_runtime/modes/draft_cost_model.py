"""Drafts as long as they pay: expected tokens a second, from measured times and acceptance.

The idea is Leviathan et al.'s (arXiv 2211.17192, section 3.3): with k drafted tokens a step gives E[accepted | k] + 1
and costs k draft steps and one verification. Both sides are measured here while serving, so nothing is assumed about
how acceptance depends on the position, nor about what verifying more tokens costs on this hardware.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sixfold_runtime.modes.draft_acceptance import Bucket, SequenceAcceptance, bucket_of
from sixfold_runtime.modes.draft_costs import StepCosts
from sixfold_runtime.modes.draft_row import Row

HYSTERESIS = 1.05
"""Another length must promise so many times the rate of the present one; drafting nothing, no more than that rate."""
ROW_LEAVES, ROW_RETURNS = 0.8, 1.2
"""A row is left out of drafting steps where its expected tokens are worth less than this share of its cost, and comes
back at the other: coming back costs reading up."""
REMEASURE_STEPS = 256
RIVAL_STEPS = 8
CLOSE_RATE = 0.85
PROBE_TOKENS = 2
PROBE_STEPS_LEAST, PROBE_STEPS, PROBE_STEPS_MOST = 4, 16, 1024
PROBE_BUDGET = 0.02
"""Share of the undrafted time that looking whether the draft has become useful may cost."""
CATCH_UP_STEPS = 64
"""A draft that reads up on a sequence is taken to be of use for no more steps than these."""
CATCH_UP_TOKENS = 4
"""A lag that needs no reading up: the tokens of the last step."""
TOKEN_OF_LAG = 1 / 32
"""What a token read costs the draft against one proposed, until measured: it reads many at once."""
WEIGHT = 0.2
"""Of the newest sample in a moving average."""


class _Probing:
    """When to draft again in contexts where it doesn't pay: ever more rarely, until one is accepted."""

    def __init__(self) -> None:
        self.idle_steps = 0
        self._pause_steps = PROBE_STEPS

    def is_due(self, cost_in_plain_steps: float) -> bool:
        budget = self.idle_steps * PROBE_BUDGET
        return self.idle_steps >= self._pause_steps and cost_in_plain_steps <= budget

    def started(self) -> None:
        self.idle_steps = 0
        self._pause_steps = min(2 * self._pause_steps, PROBE_STEPS_MOST)

    def useful(self, accepted_tokens: int) -> None:
        """What was accepted has paid for more probes."""
        self._pause_steps = PROBE_STEPS_LEAST
        self.idle_steps += int(accepted_tokens / PROBE_BUDGET)


class CostModel:
    """One length for all rows of a step (they share the draft's steps), within each row's room; 0 where none pays."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._buckets: dict[int, Bucket] = {}
        self._probing: dict[int, _Probing] = {}
        self._sequences: dict[Hashable, SequenceAcceptance] = {}
        self._costs: dict[int, StepCosts] = {}
        self._current: dict[int, int] = {}
        """The length in use, by class of batch sizes."""
        self._lag_token_seconds: float | None = None
        self._lags: dict[tuple[int, int], int] = {}
        """Tokens of lag that steps under way make up for, by their rows and longest draft."""

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        if not rows:
            return []
        costs = self._costs_of(len(rows))
        missing = costs.missing() if any(row.room_tokens for row in rows) else None
        if missing is not None:
            chosen = [min(missing, row.room_tokens) for row in rows]
        else:
            chosen = self._paying(rows, costs)
            self._probe(rows, chosen, costs)
        self._note_lag(rows, chosen)
        return chosen

    def observe(self, key: Hashable, context_tokens: int, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        if accepted:
            self._probing_of(context_tokens).useful(accepted)
        bucket, sequence = self._bucket(context_tokens), self._sequences.get(key)
        if sequence is not None:  # else a late word about a sequence that has ended
            sequence.observe(drafted, accepted, bucket)
        bucket.observe(drafted, accepted)

    def measured(self, rows: int, drafted: int, draft_seconds: float, verify_seconds: float) -> None:
        lag_tokens, costs = self._lags.pop((rows, drafted), 0), self._costs_of(rows)
        if drafted and lag_tokens:
            if costs.draft_token_seconds is None:
                return  # how much of it was reading up can't be told
            usual = min(draft_seconds, costs.draft_token_seconds * drafted)
            self._lag_token_seconds = _average(self._lag_token_seconds, (draft_seconds - usual) / lag_tokens)
            draft_seconds = usual
        costs.observe(drafted, draft_seconds, verify_seconds)

    def forget(self, key: Hashable) -> None:
        self._sequences.pop(key, None)

    def _paying(self, rows: Sequence[Row], costs: StepCosts) -> list[int]:
        """The best length for the step, and for each row whether it takes part."""
        cost = costs.seconds()
        longest = min(self._max_tokens, max(row.room_tokens for row in rows))
        if not cost or longest == 0:
            return [0] * len(rows)
        sequences = [self._sequence(row.key) for row in rows]
        expected = [s.expected(self._bucket(row.context_tokens)) for s, row in zip(sequences, rows, strict=True)]
        rates = self._rates(rows, sequences, expected, costs, longest)
        best = max(range(longest + 1), key=rates.__getitem__)
        size = _size_class(len(rows))
        present = min(longest, self._current.setdefault(size, best))
        if best and rates[best] < rates[present] * HYSTERESIS:
            best = present
        elif best < longest or longest == self._max_tokens:  # else it is only the end of the answers that shortens it
            self._current[size] = best
        step = _doubtful(costs, best, rates)
        # What a drafting row costs, in tokens that the step would otherwise make in that time.
        price = max(0.0, rates[step] * (cost[step] - cost[0]) / len(rows))
        return [
            self._share(row, sequence, gains, step, price) if len(rows) > 1 else min(step, row.room_tokens)
            for row, sequence, gains in zip(rows, sequences, expected, strict=True)
        ]

    def _rates(
        self,
        rows: Sequence[Row],
        sequences: list[SequenceAcceptance],
        expected: list[list[float]],
        costs: StepCosts,
        longest: int,
    ) -> list[float]:
        """Expected tokens a second for each length, 0 to the longest that any row has room for."""
        cost = costs.seconds()
        lagging = [row for row, sequence in zip(rows, sequences, strict=True) if not sequence.left_out]
        catch_up = sum(self._catch_up_seconds(row, len(rows)) for row in lagging)
        rates = [len(rows) / cost[0]]
        for length in range(1, longest + 1):
            gained = sum(gains[min(length, row.room_tokens)] for gains, row in zip(expected, rows, strict=True))
            rates.append((len(rows) + gained) / (cost[length] + catch_up))
        return rates

    @staticmethod
    def _share(row: Row, sequence: SequenceAcceptance, gains: list[float], step: int, price: float) -> int:
        """A row's part in a step of such length."""
        length = min(step, row.room_tokens)
        if length:
            sequence.left_out = gains[length] < price * (ROW_RETURNS if sequence.left_out else ROW_LEAVES)
        if sequence.left_out:
            sequence.fade()
            return 0
        return length

    def _probe(self, rows: Sequence[Row], chosen: list[int], costs: StepCosts) -> None:
        """Let an undrafted row draft a little now and then, to notice when it has begun to pay. One, the one that the
        draft is behind by least: reading up on all of a large batch would cost more than looking may, for ever."""
        if costs.age_steps(0) >= REMEASURE_STEPS:
            return  # a step without drafts has to be measured first
        by_bucket: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.room_tokens:
                by_bucket.setdefault(bucket_of(row.context_tokens), []).append(index)
        for indices in by_bucket.values():
            probing = self._probing_of(rows[indices[0]].context_tokens)
            if any(chosen[index] for index in indices):
                probing.idle_steps = 0
                continue
            probing.idle_steps += 1
            length = min(PROBE_TOKENS, self._max_tokens)
            nearest = min(indices, key=lambda index: rows[index].draft_lag_tokens)
            if probing.is_due(self._probe_cost(rows[nearest], len(rows), length, costs)):
                probing.started()
                chosen[nearest] = min(length, rows[nearest].room_tokens)

    def _probe_cost(self, probed: Row, rows: int, length: int, costs: StepCosts) -> float:
        """What a probe costs beyond a plain step, in plain steps."""
        cost = costs.seconds()
        if not cost:
            return 0.0
        return (cost[length] - cost[0] + probed.draft_lag_tokens * self._lag_seconds(rows)) / cost[0]

    def _catch_up_seconds(self, row: Row, rows: int) -> float:
        """Cost of reading up on a row, spread over the steps that it will be of use for."""
        if row.draft_lag_tokens <= CATCH_UP_TOKENS or not row.room_tokens:
            return 0.0
        return row.draft_lag_tokens * self._lag_seconds(rows) / min(row.room_tokens, CATCH_UP_STEPS)

    def _lag_seconds(self, rows: int) -> float:
        """Of the draft for one token of lag."""
        if self._lag_token_seconds is not None:
            return self._lag_token_seconds
        return (self._costs_of(rows).draft_token_seconds or 0.0) * TOKEN_OF_LAG

    def _note_lag(self, rows: Sequence[Row], chosen: list[int]) -> None:
        lags = [row.draft_lag_tokens for row, length in zip(rows, chosen, strict=True) if length]
        self._lags[len(rows), max(chosen)] = sum(tokens for tokens in lags if tokens > CATCH_UP_TOKENS)

    def _costs_of(self, rows: int) -> StepCosts:
        return self._costs.setdefault(_size_class(rows), StepCosts(self._max_tokens))

    def _sequence(self, key: Hashable) -> SequenceAcceptance:
        return self._sequences.setdefault(key, SequenceAcceptance())

    def _bucket(self, context_tokens: int) -> Bucket:
        index = bucket_of(context_tokens)
        if index not in self._buckets:
            shorter = [known for known in self._buckets if known < index]
            self._buckets[index] = Bucket(self._max_tokens, self._buckets[max(shorter)] if shorter else None)
        return self._buckets[index]

    def _probing_of(self, context_tokens: int) -> _Probing:
        return self._probing.setdefault(bucket_of(context_tokens), _Probing())


def _size_class(rows: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ...: steps of about as many rows cost about the same."""
    return (rows - 1).bit_length()


def _doubtful(costs: StepCosts, length: int, rates: list[float]) -> int:
    """The length itself, or now and then a rival whose cost isn't known well enough to be sure.

    Rivals that are about as good are measured every few steps until they are known well; none and the neighbours once
    in a long while. Where nothing is drafted, the probes do that.
    """
    if length == 0 or costs.age_steps(length) > 0:
        return length
    neighbours = {0, length - 1, min(length + 1, len(rates) - 1)}
    for rival in range(len(rates)):
        close = rates[rival] >= rates[length] * CLOSE_RATE and not costs.is_known(rival)
        if rival != length and (
            (close and costs.age_steps(rival) >= RIVAL_STEPS)
            or (rival in neighbours and costs.age_steps(rival) >= REMEASURE_STEPS)
        ):
            return rival
    return length


def _average(average: float | None, sample: float) -> float:
    return sample if average is None else average + WEIGHT * (sample - average)
