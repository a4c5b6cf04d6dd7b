"""The sampler's side of one request: from logits to the tokens that the answer gets, their text, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sixfold_runtime.engine.candidates import Logits
from sixfold_runtime.engine.logprobs import TokenBytes, token_logprob
from sixfold_runtime.engine.protocol import FinishReason, Generate, TokenLogprob
from sixfold_runtime.engine.sampler import Sampler, is_finite
from sixfold_runtime.engine.stream import OutputStream
from sixfold_runtime.modes.acceptance import (
    Acceptance,
    Distribution,
    Threshold,
    accept,
    accept_matching,
    accept_threshold,
)


@dataclass(frozen=True)
class Draft:
    """What a draft model proposed for a row."""

    tokens: tuple[int, ...] = ()
    distributions: tuple[Distribution, ...] = ()
    """What each was drawn from, where `Picker.propose` returned it; else empty."""


@dataclass(frozen=True)
class Picked:
    """What one step gave one request."""

    tokens: tuple[int, ...] = ()
    """New tokens of the answer, cut at its end."""
    accepted: int = 0
    """How many of them were drafted; the last one otherwise never was."""
    text: str = ""
    """What may be shown now."""
    reason: FinishReason | None = None
    """Why the answer ends here, if it does."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of each token, if the request asked for them."""
    finite: bool = True
    """False: NaN or infinite logits, and nothing was picked. The request fails."""
    faulty: bool = False
    """True: the sampler raised an error, which is in the log. The request fails."""


class _NonFiniteError(Exception):
    """A position's logits are NaN or infinite."""


class Picker:
    """Owns a request's sampler and its output stream. Used by one thread at a time.

    A seed promises the same answer again, so a seeded request is accepted losslessly whatever the setting: with a
    lossy rule its answer would depend on how many tokens were drafted.

    Args:
        vocabulary_tokens: ids from here on are never drawn: logits beyond are padding.
        random: where unseeded draws come from; the operating system's entropy without it.
    """

    def __init__(
        self,
        request: Generate,
        stream: OutputStream,
        vocabulary_tokens: int,
        acceptance: Acceptance,
        token_bytes: TokenBytes,
        random: np.random.Generator | None = None,
    ) -> None:
        self._sampling = request.sampling
        self._stream = stream
        self._vocabulary_tokens = vocabulary_tokens
        self._token_bytes = token_bytes
        self._sampler = Sampler(request.sampling, request.token_ids, random)
        self._threshold = acceptance if isinstance(acceptance, Threshold) and not self._sampler.is_seeded else None
        self._last: tuple[int, ...] = tuple(request.token_ids[-3:])
        """The last tokens of prompt and answer."""

    @property
    def is_greedy(self) -> bool:
        return self._sampler.is_greedy

    @property
    def is_plain_greedy(self) -> bool:
        """The next token is the argmax of the logits: greedy, and without penalties."""
        return self._sampler.is_greedy and not self._sampler.is_penalised

    def propose(self, logits: Logits, so_far: Sequence[int]) -> tuple[int, Distribution | None]:
        """Draw a draft token, in the same way as the target draws its own: that is accepted most often.

        Args:
            logits: the draft model's, float32 [its vocabulary], finite.
            so_far: drafted before in this step.

        Returns:
            The token, and what it was drawn from if acceptance needs that.
        """
        logits = logits[: self._vocabulary_tokens]
        with self._sampler.supposing(so_far):
            if not self._rejects:
                return self._sampler.draw(logits), None
            distribution = self._sampler.distribution(logits)
            return distribution.draw(self._sampler.uniform()), distribution

    def pick(self, logits: npt.NDArray[np.float32], draft: Draft) -> Picked:
        """Take the target's logits of a step: accept drafts, draw the token after them, and push all to the stream.

        Args:
            logits: [drafted + 1, vocabulary]; row i is after draft.tokens[:i]. Rows after the first rejection are
                not looked at.
        """
        logits = logits[:, : self._vocabulary_tokens]
        try:
            accepted, following = self._accept(logits, draft)
        except _NonFiniteError:
            return Picked(finite=False)
        return self._push(logits, (*draft.tokens[:accepted], following), accepted)

    @property
    def _rejects(self) -> bool:
        """Drafts are accepted by rejection sampling, which compares distributions."""
        return not (self._sampler.is_greedy or self._sampler.is_seeded or self._threshold)

    def _accept(self, logits: npt.NDArray[np.float32], draft: Draft) -> tuple[int, int]:
        observed = 0

        def row(position: int) -> Logits:
            """The logits at a position that is reached only with every draft before it accepted."""
            nonlocal observed
            while observed < position:
                self._sampler.observe(draft.tokens[observed])
                observed += 1
            reached: Logits = logits[position]
            if not is_finite(reached):
                raise _NonFiniteError
            return reached

        def own(position: int) -> int:
            return self._sampler.draw(row(position))

        def target(position: int) -> Distribution:
            return self._sampler.distribution(row(position))

        if self._threshold:
            decision = accept_threshold(target, draft.tokens, own, self._threshold, self._last)
        elif self._rejects:
            decision = accept(target, draft.distributions, draft.tokens, self._sampler.uniform)
        else:
            decision = accept_matching(own, draft.tokens)
        self._sampler.observe(decision[1])
        return decision

    def _push(self, logits: npt.NDArray[np.float32], tokens: tuple[int, ...], accepted: int) -> Picked:
        texts: list[str] = []
        reason: FinishReason | None = None
        for token in tokens:
            text, reason = self._stream.push(token)
            texts.append(text)
            if reason is not None:
                break
        kept = tokens[: len(texts)]
        self._last = (*self._last, *kept)[-3:]
        return Picked(kept, min(accepted, len(kept)), "".join(texts), reason, self._logprobs(logits, kept))

    def _logprobs(self, logits: npt.NDArray[np.float32], tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        top: int | None = self._sampling.logprobs
        if top is None:
            return ()
        return tuple(
            token_logprob(row, token, top, self._token_bytes) for row, token in zip(logits, tokens, strict=False)
        )
