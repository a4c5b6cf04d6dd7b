"""The chart's value `signals`: further signals, and other thresholds and windows of those that come with it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from sixfold_api.analysis import MAX_SIGNALS, SignalName
from sixfold_api.base import ApiModel
from sixfold_api.modes import Mode
from sixfold_api.scalars import Duration, duration_seconds
from sixfold_api.ticket import Cause
from sixfold_operator.control.model import Action, Signal, SignalKind

LONGEST_WINDOW_SECONDS = 86400.0

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Query = Annotated[str, Field(min_length=1, max_length=4096)]


class SignalsError(ValueError):
    """A signals file isn't right: which entry, and why."""


class _Change(ApiModel):
    """Of a built-in signal."""

    name: SignalName
    threshold: _Number | None = None
    clear: Annotated[float, Field(gt=0, le=1)] | None = None
    min_samples: Annotated[float, Field(ge=1)] | None = None
    window: Duration | None = None

    @model_validator(mode="after")
    def _window_is_usable(self) -> _Change:
        if self.window is not None and not 1.0 <= duration_seconds(self.window) <= LONGEST_WINDOW_SECONDS:
            raise ValueError("window must be between 1s and 24h")
        return self

    def fields(self) -> dict[str, Any]:
        """Of a Signal, where they are set."""
        found = self.model_dump(include={"threshold", "clear", "min_samples"}, exclude_none=True, by_alias=False)
        return found if self.window is None else {**found, "window_seconds": duration_seconds(self.window)}


class _Further(_Change):
    """A signal of one's own."""

    query: _Query
    samples: _Query
    threshold: _Number
    kind: SignalKind = SignalKind.HEALTH
    description: Annotated[str, Field(max_length=256)] = ""
    is_high_bad: bool = True
    is_primary: bool = False
    is_proportion: bool = False
    action: Action = Action.STEP_DOWN
    mode: Mode | None = None
    cause: Cause | None = None
    unit: Annotated[str, Field(max_length=16)] = ""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> _Further:
        if (self.kind is SignalKind.WASTE) != (self.cause is not None):
            raise ValueError("cause is needed for kind: Waste, and only there")
        if (self.action is Action.SUSPEND) != (self.mode is not None):
            raise ValueError("mode is needed for action: Suspend, and only there")
        if self.kind is not SignalKind.HEALTH and (self.is_primary or self.action is not Action.STEP_DOWN):
            raise ValueError("isPrimary and action belong to kind: Health")
        return self

    def signal(self) -> Signal:
        return Signal(
            name=self.name,
            kind=self.kind,
            description=self.description,
            query=self.query,
            samples=self.samples,
            is_high_bad=self.is_high_bad,
            is_primary=self.is_primary,
            is_proportion=self.is_proportion,
            action=self.action,
            blames=self.mode,
            cause=self.cause,
            unit=self.unit,
            **self.fields(),
        )


def with_changes(built_in: Sequence[Signal], document: object) -> tuple[Signal, ...]:
    """`built_in` with the entries of a document; see signals.load. Raises SignalsError."""
    if document is None:
        return tuple(built_in)
    if not isinstance(document, list):
        raise SignalsError(f"signals: a list is needed, not {type(document).__name__}")
    signals = {signal.name: signal for signal in built_in}
    seen: set[str] = set()
    for index, entry in enumerate(document):
        signal = _entry(signals, entry, f"signals[{index}]", seen)
        signals[signal.name] = signal
    if len(signals) > MAX_SIGNALS:
        raise SignalsError(f"signals: {len(signals)} signals, at most {MAX_SIGNALS} are watched")
    return tuple(signals.values())


def _entry(signals: dict[str, Signal], entry: object, where: str, seen: set[str]) -> Signal:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(name, str):
        raise SignalsError(f"{where}: an object with a name is needed")
    where = f"{where} ({name[:48]})"
    if name in seen:
        raise SignalsError(f"{where}: this name comes twice")
    seen.add(name)
    known = signals.get(name)
    try:
        if known is not None:
            return replace(known, **_Change.model_validate(entry).fields())
        return _Further.model_validate(entry).signal()
    except ValidationError as error:
        raise SignalsError(f"{where}: {_reason(error, is_known=known is not None)}") from None


def _reason(error: ValidationError, is_known: bool) -> str:
    errors = error.errors(include_url=False)
    first = errors[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden" and is_known:
        return f"{field} of a built-in signal can't be changed; threshold, clear, minSamples and window can"
    missing = sorted(str(entry["loc"][0]) for entry in errors if entry["type"] == "missing")
    if missing:
        return f"no built-in signal has this name, so it needs {', '.join(missing)}"
    return f"{field}: {first['msg']}" if field else str(first["msg"]).removeprefix("Value error, ")
