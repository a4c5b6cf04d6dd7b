"""What of a vocabulary can be drawn, found without sorting it, and the noise of seeded draws. Pure NumPy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sixfold_runtime.modes.acceptance import reach

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

SEED_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_NUCLEUS_TOKENS = (1024, 16 * 1024)
"""What is less likely than the cut mass spread over so many tokens is tried to leave out before all is sorted."""
_SORTED_WHOLE = 2048
"""A vocabulary so small is sorted at once."""
_BLOCK = 256


def largest(values: Logits, count: int) -> Ids:
    """The ids of the `count` largest values, ascending; of equal ones the lower ids.

    Some `count` blocks have a maximum not below the `count`-th largest of all block maxima, so nothing smaller than
    that can be among the largest: one pass leaves little to sort.
    """
    if count >= len(values):
        return all_ids(len(values))
    blocks = len(values) // _BLOCK
    if count > blocks:
        return _cut(values, all_ids(len(values)), np.sort(values)[-count], count)
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    ids = np.flatnonzero(values >= np.partition(maxima, blocks - count)[blocks - count])
    kept = values[ids]
    return _cut(kept, ids, np.sort(kept)[-count], count)


def _cut(values: Logits, ids: Ids, edge: np.float32, count: int) -> Ids:
    """The `count` ids with the largest values, `edge` being the smallest of these."""
    kept = values > edge
    kept[np.flatnonzero(values == edge)[: count - int(np.count_nonzero(kept))]] = True
    return ids[kept]


def nucleus(weights: Weights, top_p: float) -> Ids:
    """The smallest set of largest weights that has at least `top_p` of their sum; of equal weights the lower ids.

    Args:
        weights: [n], above or equal 0, not all 0.

    Returns:
        Ids, ascending, at least one.
    """
    total = float(np.add.reduce(weights))
    target = top_p * total
    pool, kept = all_ids(len(weights)), weights
    if len(weights) > _SORTED_WHOLE:
        for expected in _NUCLEUS_TOKENS:
            likely = np.flatnonzero(weights > (total - target) / expected)
            if len(likely) and float(np.add.reduce(weights[likely])) >= target:
                pool, kept = likely, weights[likely]
                break
    descending = np.sort(kept)[::-1]
    count = 1 + reach(descending, target, "left")
    return _cut(kept, pool, descending[count - 1], count)


@lru_cache(maxsize=8)
def all_ids(tokens: int) -> Ids:
    """Every id of a vocabulary; read-only."""
    ids = np.arange(tokens)
    ids.flags.writeable = False
    return ids


def noise(seed: int, position: int, ids: Ids) -> npt.NDArray[np.float64]:
    """Exponentially distributed numbers, each a hash of (seed, position, token id): SplitMix64, 53 bits.

    The token with the least noise / probability is distributed by the probabilities (the Gumbel-max trick).
    """
    key = _mixed(_mixed((seed + _GOLDEN) & SEED_MASK) ^ (position * _GOLDEN & SEED_MASK))
    bits = ids.astype(np.uint64)
    bits *= np.uint64(_GOLDEN)
    bits += np.uint64(key)
    for shift, factor in _MIXERS:
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    bits >>= np.uint64(11)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    negative: npt.NDArray[np.float64] = np.log(uniform, out=uniform)
    return np.negative(negative, out=negative)


def _mixed(bits: int) -> int:
    for shift, factor in _MIXERS:
        bits = (bits ^ bits >> shift) * factor & SEED_MASK
    return bits ^ bits >> 31
