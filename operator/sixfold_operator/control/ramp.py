"""The canary's way: started, widened, promoted or rejected."""

from __future__ import annotations

from datetime import datetime

from sixfold_api.control_status import TunedValue
from sixfold_operator.control.model import Outcome, State, View


def begin_tuned(state: State, view: View, tuned: TunedValue, now: datetime) -> Outcome:
    """A tuned value on its way: through the canary, or for all at once where there is none or it can't be split.

    Nothing happens while another canary runs, or where the value was rejected for this spec.
    """
    return Outcome(state)
