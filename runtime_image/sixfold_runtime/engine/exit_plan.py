"""After which layers texts may leave, and how sure they have to be: the exit heads under the configuration in use."""

from __future__ import annotations

from dataclasses import dataclass

from sixfold_api.runtime_config import EarlyExitConfig
from sixfold_runtime.engine.exit_heads import ExitHeads
from sixfold_runtime.modes.early_exit import Exits, choose
from sixfold_runtime.modes.exit_drift import ExitDrift


@dataclass(frozen=True, eq=False)
class ExitPlan:
    """Thresholds in use."""

    heads: ExitHeads
    exits: Exits
    drift: ExitDrift
    """Of the texts that ran under these thresholds."""

    def next_depth(self, depth: int) -> int | None:
        """The next one, after `depth` layers, with a threshold."""
        return min((later for later in self.exits.thresholds if later > depth), default=None)


class ExitPlanner:
    """Chooses thresholds when the configuration changes, and only then.

    Attributes:
        plan: None while no text may leave early.
        why_not: why none may though the mode is on; "" otherwise.
    """

    def __init__(self, heads: ExitHeads | None, why_no_heads: str) -> None:
        self._heads = heads
        self._why_no_heads = why_no_heads
        self._config: EarlyExitConfig | None = None
        self._rule: EarlyExitConfig | None = None
        self._chosen: ExitPlan | None = None
        self._why_none = ""
        self.plan: ExitPlan | None = None
        self.why_not = ""

    def follow(self, config: EarlyExitConfig | None) -> None:
        """`config` is None while the mode is off. Turned off and on again, the same thresholds and drift go on."""
        if config is self._config:
            return
        self._config = config
        if config is None:
            self.plan, self.why_not = None, ""
        elif self._heads is None:
            self.why_not = self._why_no_heads
        else:
            rule = config.model_copy(update={"sanitize": None})
            if rule != self._rule:
                self._rule = rule
                self._choose(self._heads, rule)
            self.plan, self.why_not = self._chosen, self._why_none

    def _choose(self, heads: ExitHeads, rule: EarlyExitConfig) -> None:
        calibration = heads.calibration
        try:
            choice = choose(
                calibration,
                rule.rule,
                threshold=rule.threshold,
                max_disagreement=rule.max_disagreement,
                length_relaxation=rule.length_relaxation,
            )
        except ValueError as error:
            self._chosen, self._why_none = None, f"no thresholds by rule {rule.rule}: {error}"
            return
        if not choice.exit_rate:
            self._chosen = None
            self._why_none = f"by rule {rule.rule}, no calibration text would leave early: none is sure enough"
            return
        drift = ExitDrift(calibration.lengths.tolist(), choice.exit_rate)
        self._chosen, self._why_none = ExitPlan(heads, choice.exits, drift), ""
