"""Which weights the requests of each arm get, and what an arm has to do without because of that."""

from __future__ import annotations

from sixfold_api.modes import Mode
from sixfold_api.runtime_config import CANARY, STABLE, EffectiveConfig, ServedModel
from sixfold_api.scalars import FullWeights
from sixfold_runtime.engine.held_sets import HeldSets
from sixfold_runtime.engine.shadow_generation import ShadowSide
from sixfold_runtime.engine.work import CurrentConfig, arms_in_use


class WeightRoutes:
    """Used from the engine's thread; reads only, so that its answers may be asked for from any.

    Attributes:
        active: name of the weights that the stable arm's new requests get; "" while there are none.
        taken: the names that new requests of the stable arm and of the canary got when `follow` was last asked.
    """

    def __init__(
        self, served: ServedModel, config: CurrentConfig, full_weights: FullWeights | None, sets: HeldSets, active: str
    ) -> None:
        self._served = served
        self._config = config
        self._full_weights = full_weights
        self._sets = sets
        self.active = active
        self.taken = self._now()

    @property
    def wanted(self) -> str:
        """By the stable arm."""
        return wanted_weights(self._served, self._config().stable)

    @property
    def missing(self) -> str:
        """Weights that are to stay in memory with the others, that the canary wants, and that aren't there; else ""."""
        canary = self._config().canary
        if self._full_weights is not FullWeights.RESIDENT or canary is None:
            return ""
        wanted = wanted_weights(self._served, canary.config)
        return "" if wanted in self._sets else wanted

    def of(self, arm: str) -> str:
        """What new requests of an arm get: what it wants where both sets are there, else the active one."""
        wanted = wanted_weights(self._served, self._config().of(arm))
        return wanted if self._full_weights is FullWeights.RESIDENT and wanted in self._sets else self.active

    def follow(self) -> bool:
        """Bring `taken` up to date; returns whether that changed anything."""
        before, self.taken = self.taken, self._now()
        return self.taken != before

    def level_0(self) -> ShadowSide | None:
        """The full weights, where they are in memory whatever the level is."""
        if self._full_weights is FullWeights.SWAP:
            return None
        return held.side if (held := self._sets.get(self._served.name)) else None

    def why_not_quantized(self, weights_error: str) -> str:
        """Why requests of an arm that has the mode on get the full weights; "" where none do, or not for long.

        Args:
            weights_error: why weights that are wanted can't be loaded.
        """
        quantized, canary = self._served.quantized, self._config().canary
        if quantized is None:
            return ""
        if self.wanted == quantized.name:
            return weights_error if self.active != quantized.name else ""
        if canary is None or wanted_weights(self._served, canary.config) != quantized.name:
            return ""
        if self._full_weights is FullWeights.RESIDENT:
            return weights_error if quantized.name not in self._sets else ""
        return (
            f"the canary of model {self._served.name} gets the stable arm's weights: with fullWeights Swap one set is "
            "in memory at a time"
        )

    @property
    def shadow_off(self) -> str:
        """Why answers aren't computed again although the configuration says so; "" where they are."""
        arms = arms_in_use(self._config())
        if not any(arm.shadow is not None and arm.shadow.sample_rate > 0 for arm in arms) or self.level_0():
            return ""
        why = "aren't in memory"
        if self._full_weights is FullWeights.SWAP:
            why = "aren't in memory beside the quantised ones (fullWeights Swap)"
        return f"answers of model {self._served.name} aren't computed again: its full weights, level 0's, {why}"

    def _now(self) -> tuple[str, str]:
        return self.of(STABLE), self.of(CANARY)


def wanted_weights(served: ServedModel, effective: EffectiveConfig) -> str:
    """The name of the weights that a configuration asks for."""
    quantized = served.quantized
    return quantized.name if quantized is not None and effective.is_active(Mode.QUANTIZED) else served.name
