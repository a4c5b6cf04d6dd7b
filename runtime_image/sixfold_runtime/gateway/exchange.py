"""One HTTP request from arrival to end: what the log and the metrics say about it."""

from __future__ import annotations

import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from sixfold_api.gateway import Priority
from sixfold_api.runtime_config import STABLE, RequestLimits
from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import Chunk, Done
from sixfold_runtime.gateway.activity import Activity
from sixfold_runtime.gateway.deadline import Deadline
from sixfold_runtime.gateway.errors import DEADLINE_EXCEEDED
from sixfold_runtime.gateway.headers import Terms
from sixfold_runtime.gateway.metrics import GatewayMetrics, RequestLabels
from sixfold_runtime.length_bucket import length_bucket
from sixfold_runtime.logs import rfc3339
from sixfold_runtime.tracing import RequestTrace

log = logging.getLogger("sixfold.requests")
CLIENT_CLOSED = 499
"""Status in the log of a request whose client left before the answer ended; nginx's number for it."""
_ATTRIBUTES = {
    "status": "http.response.status_code",
    "tenant": "sixfold.tenant",
    "model_name": "gen_ai.response.model",
    "task": "sixfold.task",
    "level": "sixfold.level",
    "arm": "sixfold.arm",
    "input_length": "gen_ai.usage.input_tokens",
    "output_length": "gen_ai.usage.output_tokens",
    "cached_length": "sixfold.cached_tokens",
    "engine_seconds": "sixfold.engine_seconds",
    "finish_reason": "gen_ai.response.finish_reason",
}
"""Of a request's span: what its line in the log says too."""
_BEFORE_ADMISSION = Terms(Priority.NORMAL, RequestLimits().timeout_seconds)


def request_id(header: str) -> str:
    """The caller's X-Request-ID, cut to 128 harmless characters, or a new one."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", header[:512])[:128] or secrets.token_hex(16)


@dataclass
class Exchange:
    """Filled in while the request runs.

    Attributes:
        level: the configuration's level at arrival, then the level that the engine stamped.
        model: variant that answered; empty until one is chosen.
        slice: task slice that it answered with; empty until an engine that offers it is chosen.
        deadline: the server's own at first, then what the terms say.
        terms: what it may have; known once it is admitted.
        arm: stable until the request's key is known.
        longest_tokens: of its prompts or texts the longest; 0 until one is tokenised.
        engine_seconds: that engines spent on it, as far as they said: of all its prompts or texts.
        parts_engine_seconds: that engines spent on calls on its behalf.
        is_part: it is such a call itself.
        activity: where it counts as one that runs; None until it is let in.
        trace: its spans, where requests are traced.
    """

    id: str
    metrics: GatewayMetrics
    level: int
    path: str
    deadline: Deadline
    started_unix_seconds: float = field(default_factory=time.time)
    started_seconds: float = field(default_factory=time.monotonic)
    tenant: str = ""
    terms: Terms = _BEFORE_ADMISSION
    task: Task | None = None
    model: str = ""
    slice: str = ""
    arm: str = STABLE
    input_tokens: int = 0
    longest_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    error_code: str = ""
    first_token_seconds: float | None = None
    engine_seconds: float = 0.0
    parts_engine_seconds: float = 0.0
    status: int = 0
    client_left: bool = False
    is_part: bool = False
    activity: Activity | None = None
    trace: RequestTrace | None = None

    @property
    def labels(self) -> RequestLabels:
        return RequestLabels(self.model, self.task or "", self.slice, str(self.level), self.arm)

    @property
    def length_bucket(self) -> str:
        return length_bucket(self.longest_tokens)

    def part(self) -> Exchange:
        """For a call to another model on behalf of this request: it has times of its own and isn't counted again."""
        return Exchange(
            self.id,
            self.metrics,
            self.level,
            self.path,
            self.deadline,
            tenant=self.tenant,
            terms=self.terms,
            arm=self.arm,
            is_part=True,
            trace=self.trace,
        )

    def tokens(self, chunk: Chunk, last_seconds: float | None) -> float | None:
        """Take the times of a chunk; `last_seconds` is when the tokens before came. Returns the new one."""
        if chunk.tokens == 0:
            return last_seconds
        now = time.monotonic()
        self.output_tokens += chunk.tokens
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.started_seconds
            self.metrics.first_token(self.labels, self.first_token_seconds)
        elif last_seconds is not None:
            self.metrics.next_tokens(self.labels, chunk.tokens, now - last_seconds)
        return now

    def ended(self, done: Done) -> None:
        """Take what an engine said at the end of one of its prompts or texts."""
        self.level = done.level
        self.engine_seconds += done.engine_seconds
        if done.failure is not None:
            return
        self.finish_reason = done.finish_reason
        if self.task is Task.GENERATION and not self.is_part:
            self.metrics.answer(self.labels, done.completion_tokens)

    def merge(self, part: Exchange) -> None:
        """A call on behalf of this request is over: what it took is counted as the other model's."""
        self.metrics.engine_seconds(part.labels, part.length_bucket, part.engine_seconds)
        self.parts_engine_seconds += part.engine_seconds

    def agree(self, terms: Terms) -> None:
        """It is admitted on these terms."""
        self.terms = terms
        self.deadline.move(self.started_seconds + terms.timeout_seconds)

    def end(self) -> None:
        """Count and log it."""
        if self.activity is not None:
            self.activity.end()
        seconds = time.monotonic() - self.started_seconds
        status = CLIENT_CLOSED if self.client_left else self.status
        if self.task is not None:
            self.metrics.request(self.labels, self.length_bucket, self._outcome(status), seconds)
            self.metrics.engine_seconds(self.labels, self.length_bucket, self.engine_seconds)
        fields: dict[str, Any] = {
            "X-Request-ID": self.id,
            "path": self.path,
            "status": status,
            "tenant": self.tenant,
            "model_name": self.model,
            "task": self.slice,
            "level": self.level,
            "arm": self.arm,
            "priority": None if self.task is None else self.terms.priority,
            "input_length": self.input_tokens,
            "cached_length": self.cached_tokens,
            "output_length": self.output_tokens,
            "start_time": rfc3339(self.started_unix_seconds),
            "end_time": rfc3339(self.started_unix_seconds + seconds),
            "ttft_seconds": None if self.first_token_seconds is None else round(self.first_token_seconds, 4),
            "engine_seconds": round(self.engine_seconds + self.parts_engine_seconds, 6) or None,
            "finish_reason": self.finish_reason,
            "error_code": self.error_code,
        }
        said = {name: value for name, value in fields.items() if value not in ("", None)}
        log.info("request", extra={"fields": said})
        if self.trace is not None:
            about = {_ATTRIBUTES[name]: said[name] for name in _ATTRIBUTES.keys() & said.keys()}
            self.trace.end(about, self.error_code or ("client_left" if self.client_left else ""))

    def _outcome(self, status: int) -> str:
        """ok, error (ours), refused (the caller's fault), limited, cancelled. A stream may fail after its 200."""
        if status == CLIENT_CLOSED or (self.error_code == DEADLINE_EXCEEDED and self.terms.is_timeout_asked):
            return "cancelled"  # a client that stops waiting tells nothing of us, whether it hangs up or names a time
        if status == 429:
            return "limited"
        if status >= 500 or (status < 400 and self.error_code):
            return "error"
        return "refused" if status >= 400 else "ok"
