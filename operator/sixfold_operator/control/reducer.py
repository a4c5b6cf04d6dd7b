"""What follows from a policy's state and what was observed: the one place that decides. Pure, with the clock given."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sixfold_operator.control.model import CanaryJudgement, Observed, Outcome, State, View


def decide(
    state: State, view: View, observed: Sequence[Observed], canary: CanaryJudgement | None, now: datetime
) -> Outcome:
    """One look at a policy.

    It is called once an interval, and right after its spec or an alert changed. At most one thing changes a call.

    Args:
        observed: signals and alerts, judged; one that is absent keeps its remembered verdict and count.
        canary: how the running canary compares with the rest; None where none runs or nobody looked.
        now: aware, UTC.
    """
    return Outcome(state)
