"""What early exit would have saved where it is off: exit heads are asked on a sample of batches, and change nothing.

The sample is as large as a small share of the computing time allows: cheap batches are looked at often, and a batch of
one short text, where asking all heads takes longest in proportion, rarely.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from sixfold_api.runtime_config import EarlyExitConfig
from sixfold_runtime.engine.classification_queue import Text
from sixfold_runtime.engine.exit_heads import ExitHeads
from sixfold_runtime.engine.exit_plan import ExitPlan, ExitPlanner
from sixfold_runtime.engine.trunk import Rows, Trunk

_MAX_SHARE = 0.01
"""Of the computing time; looking is done in whole batches, so that it may be exceeded by one of them."""
_WINDOW_TEXTS = 512
"""The estimate is the mean over so many last texts that were looked at."""


class ExitEstimate:
    """Of one model, by the thresholds that its calibration gives without a policy's word. Used from one thread.

    Attributes:
        clock: seconds.
        is_possible: there are exit heads, and texts of the calibration would leave at them.
    """

    def __init__(self, heads: ExitHeads | None, clock: Callable[[], float] = time.perf_counter) -> None:
        planner = ExitPlanner(heads, "")
        planner.follow(EarlyExitConfig())
        self._plan = planner.plan
        self.clock = clock
        self._looking_seconds = self._computing_seconds = 0.0
        self._last: deque[tuple[int, int]] = deque(maxlen=_WINDOW_TEXTS)
        self._unneeded = self._all = 0
        self.is_possible = self._plan is not None

    def computed(self, seconds: float) -> None:
        """A step took this long, with what was looked at."""
        self._computing_seconds += seconds

    def looked(self, seconds: float) -> None:
        """Of a step, the part for looking at it."""
        self._looking_seconds += seconds

    def glance(self, trunk: Trunk) -> Glance | None:
        """At a batch that begins; None where it isn't its turn."""
        if self._plan is None or self._looking_seconds > _MAX_SHARE * self._computing_seconds:
            return None
        return Glance(self, self._plan, trunk)

    @property
    def unneeded_share(self) -> float:
        """Of the operations in layers, 0 to 1: what texts would have saved."""
        return self._unneeded / self._all if self._all else 0.0

    def saw(self, tokens: int, unneeded_layers: int, layers: int) -> None:
        """A text would have needed so many layers less than it ran through."""
        if len(self._last) == _WINDOW_TEXTS:
            unneeded, total = self._last[0]
            self._unneeded, self._all = self._unneeded - unneeded, self._all - total
        # A token's operations are taken for all tokens' alike: attention's part depends on the length, and is small.
        self._last.append((tokens * unneeded_layers, tokens * layers))
        self._unneeded, self._all = self._unneeded + tokens * unneeded_layers, self._all + tokens * layers


class Glance:
    """At one batch: nothing waits for a device until the batch is through."""

    def __init__(self, estimate: ExitEstimate, plan: ExitPlan, trunk: Trunk) -> None:
        self._estimate, self._plan, self._trunk = estimate, plan, trunk
        self._asked: list[tuple[int, list[Text], torch.Tensor]] = []

    def look(self, depth: int, rows: Rows, texts: Sequence[Text]) -> None:
        """`rows` of the texts after `depth` layers."""
        if depth not in self._plan.exits.thresholds:
            return
        asked = [index for index, text in enumerate(texts) if text.could_exit]
        if not asked:
            return
        started = self._estimate.clock()
        chosen = rows if len(asked) == len(texts) else self._trunk.select(rows, asked)
        confidences = self._plan.heads.scores(depth, self._trunk.features(chosen)).amax(dim=-1)
        self._asked.append((depth, [texts[index] for index in asked], confidences))
        self._estimate.looked(self._estimate.clock() - started)

    def end(self) -> None:
        """All layers are computed: note where each text would have left."""
        started, layers = self._estimate.clock(), self._trunk.layers
        left: dict[Text, int] = {}
        for depth, texts, confidences in self._asked:
            for text, confidence in zip(texts, confidences.tolist(), strict=True):
                if confidence >= self._plan.exits.least_confidence(depth, text.tokens):
                    left.setdefault(text, depth)
        for text in self._asked[-1][1] if self._asked else ():
            text.account.needed_layers = left.get(text, layers)
            self._estimate.saw(text.tokens, layers - text.account.needed_layers, layers)
        self._estimate.looked(self._estimate.clock() - started)
