"""Waste signals, which open tickets and tune, and figures, which are read for both and never judged. Names are API."""

from __future__ import annotations

from functools import partial

from sixfold_api.modes import Mode
from sixfold_api.ticket import Cause
from sixfold_operator.control.health_signals import (
    ACCEPTED,
    BLOCKS,
    DRAFTED,
    ERRORS,
    LOOKED_UP,
    REQUESTS,
)
from sixfold_operator.control.model import Signal, SignalKind
from sixfold_operator.control.promql import (
    BY_ARM,
    BY_POLICY,
    BY_VARIANT,
    arrived,
    at_most,
    mean,
    p95,
    per_second,
    share,
)

_WINDOW_SECONDS = 600.0
_CANARY_SECONDS = 300.0
_IDLE_SECONDS = 3600.0
"""A pause of minutes is no idle accelerator."""

_FLOPS, _BUSY, _TOKENS = "sixfold_flops_total", "sixfold_engine_busy_seconds_total", "sixfold_tokens_total"
_LOADS, _LOADED = "sixfold_slice_loads_total", 'result="ok"'
_ENDED = arrived("sixfold_engine_requests_total", BY_VARIANT)
_ACTUAL, _PADDED = (per_second(_TOKENS, BY_VARIANT, f'kind="{kind}"') for kind in ("actual", "padded"))
_WASTED = per_second(_FLOPS, f"{BY_VARIANT}, cause", 'outcome="wasted"')

_BUSY_SHARE = (
    # A pod that has computed nothing yet has no busy series, but each has loaded a model. `and` leaves pods that went.
    f"avg by ({BY_POLICY}) (sum by ({BY_POLICY}, instance) (rate({_BUSY}[$window]) and {_BUSY})"
    f" or 0 * max by ({BY_POLICY}, instance) (sixfold_model_load_seconds))"
)
_BUSY_MINUTES = f"max by ({BY_POLICY}) (count_over_time(sixfold_model_load_seconds[$window:1m]))"
"""Minutes in which there was a pod: one that has just come is not idle yet."""
_BUSY_SAMPLES = f"max by ({BY_POLICY}) (count_over_time(sixfold_model_load_seconds[$window]))"

FRESHNESS = "Freshness"
"""Seconds since the newest sample of a policy, by Prometheus' own clock; its samples are the most scrapes of a pod
within SCRAPES_SECONDS. Whether a snapshot is Found, Stale or Missing is told by it."""
SCRAPES_SECONDS = 15
HEAT_MAP = "HeatMap"
"""Requests by variant and length of the prompt: the cell of a ticket."""

_waste = partial(
    Signal,
    kind=SignalKind.WASTE,
    samples=_ENDED,
    min_samples=50.0,
    window_seconds=_WINDOW_SECONDS,
    unit="share",
)
_figure = partial(Signal, kind=SignalKind.FIGURE, threshold=0.0, window_seconds=_WINDOW_SECONDS)


def _by_task(query: str) -> str:
    """Largest of any pod, with the task's name as variant."""
    return f'label_replace(max by ({BY_POLICY}, task) ({query}), "variant", "$1", "task", "(.*)")'


def _flops(cause: str) -> str:
    return share(_FLOPS, BY_VARIANT, f'cause="{cause}"')


WASTE = (
    _waste(
        name="WastedFlops",
        description="wasted share of operations",
        query=share(_FLOPS, BY_VARIANT, 'outcome="wasted"'),
        threshold=0.65,
    ),
    _waste(
        name="PaddingWaste",
        description="padding's share of token positions",
        query=f"({_PADDED} - {_ACTUAL}) / {_PADDED}",
        threshold=0.4,
        cause=Cause.PADDING,
    ),
    _waste(
        name="RejectedDrafts",
        description="share of drafted tokens that were rejected",
        query=f"1 - {share(ACCEPTED, BY_VARIANT, whole=DRAFTED)}",
        samples=arrived(DRAFTED, BY_VARIANT),
        threshold=0.6,
        min_samples=500.0,
        cause=Cause.REJECTED_DRAFT,
        blames=Mode.SPECULATIVE,
    ),
    _waste(
        name="RecomputedPrefix",
        description="share of operations on prefixes that were computed before",
        query=_flops("recomputed_prefix"),
        threshold=0.3,
        cause=Cause.RECOMPUTED_PREFIX,
    ),
    _waste(
        name="UnneededLayers",
        description="share of operations in layers after the label was sure",
        query=_flops("unneeded_layers"),
        threshold=0.3,
        cause=Cause.UNNEEDED_LAYERS,
    ),
    _waste(
        name="CancelledWork",
        description="share of operations for clients that left",
        query=_flops("cancelled"),
        threshold=0.2,
        cause=Cause.CANCELLED,
    ),
    _waste(
        name="KVHitRate",
        description="share of looked-up blocks that were found",
        query=share(BLOCKS, BY_POLICY, 'result=~"hit_.*"', of=LOOKED_UP),
        samples=arrived(BLOCKS, BY_POLICY, LOOKED_UP),
        threshold=0.2,
        min_samples=200.0,
        is_high_bad=False,
        cause=Cause.LOW_HIT_RATE,
        blames=Mode.KV_CACHE_REUSE,
    ),
    _waste(
        name="MisHotTask",
        description="loads of a task's slice in one pod, an hour",
        query=_by_task(f"3600 * rate({_LOADS}{{{_LOADED}}}[$window])"),
        samples=_by_task(f"increase({_LOADS}{{{_LOADED}}}[$window])"),
        threshold=30.0,
        min_samples=3.0,
        cause=Cause.MIS_HOT_TASK,
        blames=Mode.SUBGRAPHS,
        unit="",
    ),
    _waste(
        name="IdleAccelerator",
        description="share of the time in which pods that hold a model compute",
        query=_BUSY_SHARE,
        samples=_BUSY_MINUTES,
        threshold=0.1,
        min_samples=30.0,
        is_high_bad=False,
        cause=Cause.IDLE_ACCELERATOR,
        window_seconds=_IDLE_SECONDS,
    ),
    _waste(
        name="GeneratedLabels",
        description="share of generated answers of at most 4 tokens",
        query=at_most("sixfold_answer_tokens", 4, BY_VARIANT),
        samples=arrived("sixfold_answer_tokens_count", BY_VARIANT),
        threshold=0.5,
        cause=Cause.GENERATED_LABELS,
    ),
)

FIGURES = (
    _figure(
        name=FRESHNESS,
        description="seconds since the newest sample",
        query=f"time() - max by ({BY_POLICY}) (timestamp(sixfold_level))",
        # The most of five minutes, so that an outage doesn't look like a longer interval.
        samples=f"max_over_time((max by ({BY_POLICY}) (count_over_time(sixfold_level[{SCRAPES_SECONDS}s])))"
        f"[5m:{SCRAPES_SECONDS}s])",
    ),
    _figure(
        name="RequestCost",
        description="engine seconds of a request",
        query=mean("sixfold_request_engine_seconds", BY_ARM),
        samples=arrived("sixfold_request_engine_seconds_count", BY_ARM),
        unit="s",
    ),
    _figure(
        name="RequestRate",
        description="requests a second",
        query=per_second("sixfold_requests_total", BY_ARM),
        samples=arrived("sixfold_requests_total", BY_ARM),
    ),
    _figure(
        name=HEAT_MAP,
        description="requests a second by variant and length of the prompt",
        query=per_second("sixfold_requests_total", f"{BY_VARIANT}, length_bucket", 'length_bucket!=""'),
        samples=arrived("sixfold_requests_total", f"{BY_VARIANT}, length_bucket", 'length_bucket!=""'),
    ),
    _figure(
        name="WastedByCause",
        description="share of a variant's operations that each cause wasted",
        query=f"{_WASTED} / on ({BY_VARIANT}) group_left () {per_second(_FLOPS, BY_VARIANT)}",
        samples=f"0 * {_WASTED} + on ({BY_VARIANT}) group_left () {_ENDED}",
        unit="share",
    ),
    _figure(
        name="BusyShare",
        description="share of the time in which pods that hold a model compute",
        query=_BUSY_SHARE,
        samples=_BUSY_SAMPLES,
        unit="share",
    ),
    _figure(
        name="ArmErrorRate",
        description="share of requests that failed, by arm",
        query=ERRORS,
        samples=REQUESTS,
        window_seconds=_CANARY_SECONDS,
        unit="share",
    ),
    _figure(
        name="ArmRequestP95",
        description="95th percentile of a request's time, by arm",
        query=p95("sixfold_request_seconds", BY_ARM),
        samples=arrived("sixfold_request_seconds_count", BY_ARM),
        window_seconds=_CANARY_SECONDS,
        unit="s",
    ),
)
