"""What is watched: the signals that come with the product, and those that the chart's values add or change. Pure.

Each is one PromQL query for all policies. Counters of pods that restarted or went are right in it, because rates and
increases are taken of every series before anything is summed up.
"""

from __future__ import annotations

from sixfold_operator.control.health_signals import HEALTH
from sixfold_operator.control.model import Signal
from sixfold_operator.control.signal_files import SignalsError, with_changes
from sixfold_operator.control.waste_signals import FIGURES, WASTE

__all__ = ["BUILT_IN", "SignalsError", "load"]

BUILT_IN: tuple[Signal, ...] = (*HEALTH, *WASTE, *FIGURES)
"""Those that come with the product. Their names are API."""


def load(document: object) -> tuple[Signal, ...]:
    """BUILT_IN with what a signals file says.

    Args:
        document: a parsed list. An entry with the name of a built-in signal changes its threshold, window, minSamples
            or clear: {name: TTFTP95, window: 15s}. Any other is a further signal, with query, samples and threshold
            at least. None is an empty list.

    Raises:
        SignalsError: what is wrong with which entry.
    """
    return with_changes(BUILT_IN, document)
