"""Health signals: a breach rolls back. Names are API."""

from __future__ import annotations

from functools import partial

from sixfold_api.modes import Mode
from sixfold_operator.control.model import Action, Signal, SignalKind
from sixfold_operator.control.promql import (
    BY_ARM,
    BY_LEVEL,
    BY_POLICY,
    BY_VARIANT,
    REAL,
    arrived,
    p95,
    per_second,
    share,
)

_SHADOW_SECONDS = 600.0
_COMPARED = 'result=~"agree|differ"'
_LABELS = f'task!="Generation",{_COMPARED}'
BLOCKS, LOOKED_UP = "sixfold_kv_blocks_total", 'result!="skipped"'
DRAFTED, ACCEPTED = "sixfold_draft_tokens_total", "sixfold_accepted_tokens_total"
_ASKED = "sixfold_exit_confidence_count"

ERRORS = share("sixfold_requests_total", BY_ARM, 'outcome="error"', of=REAL)
REQUESTS = arrived("sixfold_requests_total", BY_ARM, REAL)

_signal = partial(Signal, kind=SignalKind.HEALTH)


def _latency(metric: str, by: str = BY_ARM) -> partial[Signal]:
    """A signal about the 95th percentile of a histogram of seconds."""
    return partial(_signal, query=p95(metric, by), samples=arrived(f"{metric}_count", by), unit="s")


HEALTH = (
    _signal(
        name="ErrorRate",
        description="share of requests that failed",
        query=ERRORS,
        samples=REQUESTS,
        threshold=0.05,
        is_primary=True,
        unit="share",
    ),
    _latency("sixfold_request_seconds")(
        name="RequestP95", description="95th percentile of a request's time", threshold=30.0, is_primary=True
    ),
    _latency("sixfold_time_to_first_token_seconds")(
        name="TTFTP95", description="95th percentile of the time to the first token", threshold=2.0
    ),
    _latency("sixfold_inter_token_latency_seconds")(
        name="InterTokenP95", description="95th percentile of the time between tokens", threshold=0.25
    ),
    _signal(
        name="ExitRate",
        description="share of texts that left early, of those whose exit heads were asked",
        # The first head is asked about each text, so its count is the largest.
        query=f'sum by ({BY_POLICY}) (rate(sixfold_exit_request_seconds_count{{exited="true"}}[$window])) / '
        f"sum by ({BY_POLICY}) (max by ({BY_VARIANT}) ({per_second(_ASKED, f'{BY_VARIANT}, depth')}))",
        samples=f"sum by ({BY_POLICY}) (max by ({BY_VARIANT}) ({arrived(_ASKED, f'{BY_VARIANT}, depth')}))",
        threshold=0.1,
        is_high_bad=False,
        action=Action.SUSPEND,
        blames=Mode.EARLY_EXIT,
        unit="share",
    ),
    _signal(
        name="AcceptanceRate",
        description="share of drafted tokens that the target accepted",
        query=share(ACCEPTED, BY_LEVEL, whole=DRAFTED),
        samples=arrived(DRAFTED, BY_LEVEL),
        threshold=0.3,
        is_high_bad=False,
        min_samples=100.0,
        action=Action.SUSPEND,
        blames=Mode.SPECULATIVE,
        unit="share",
    ),
    _signal(
        name="DraftTime",
        description="time of drafting over the time of verifying",
        query=f"{per_second('sixfold_draft_seconds_sum', BY_LEVEL)} / "
        f"{per_second('sixfold_verify_seconds_sum', BY_LEVEL)}",
        samples=arrived("sixfold_verify_seconds_count", BY_LEVEL),
        threshold=0.8,
        action=Action.SUSPEND,
        blames=Mode.SPECULATIVE,
    ),
    _signal(
        name="KVFaults",
        description="share of looked-up blocks that a fault of the store kept back",
        query=share(BLOCKS, BY_POLICY, 'result="fault"', of=LOOKED_UP),
        samples=arrived(BLOCKS, BY_POLICY, LOOKED_UP),
        threshold=0.5,
        action=Action.SUSPEND,
        blames=Mode.KV_CACHE_REUSE,
        unit="share",
    ),
    _latency("sixfold_buffer_wait_seconds", BY_LEVEL)(
        name="BufferWait",
        description="95th percentile of the wait for a free buffer of the sampler pipeline",
        threshold=0.05,
        action=Action.SUSPEND,
        blames=Mode.SAMPLER_PIPELINE,
    ),
    _latency("sixfold_gateway_queue_wait_seconds", BY_POLICY)(
        name="QueueWait",
        description="95th percentile of the wait in the gateway's queue",
        threshold=2.0,
        action=Action.SUSPEND,
        blames=Mode.DYNAMIC_BATCHING,
    ),
    _signal(
        name="ShadowDisagreement",
        description="share of labels that differ from level 0's",
        query=share("sixfold_shadow_total", BY_ARM, 'task!="Generation",result="differ"', of=_LABELS),
        samples=arrived("sixfold_shadow_total", BY_ARM, _LABELS),
        threshold=0.05,
        is_proportion=True,
        window_seconds=_SHADOW_SECONDS,
        action=Action.LEVEL_0,
        unit="share",
    ),
    _signal(
        name="ShadowDivergence",
        description="mean divergence of level 0 from what was served, in nats a token",
        query=f"{per_second('sixfold_shadow_kl_nats_total', BY_ARM)} / "
        f"{per_second('sixfold_shadow_tokens_total', BY_ARM, _COMPARED)}",
        samples=arrived("sixfold_shadow_tokens_total", BY_ARM, _COMPARED),
        threshold=0.05,
        min_samples=200.0,
        window_seconds=_SHADOW_SECONDS,
        action=Action.LEVEL_0,
    ),
)
