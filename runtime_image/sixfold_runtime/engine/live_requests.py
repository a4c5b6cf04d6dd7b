"""The requests of an engine that have no Done yet: whose they are, and which runner has them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sixfold_runtime.engine.errors import RequestError
from sixfold_runtime.engine.protocol import Chunk, Done, Request
from sixfold_runtime.engine.work import Key, Output, Runner, Sink, failed

log = logging.getLogger(__name__)


class LiveRequests:
    """Changed by the engine's thread; its length may be asked from any."""

    def __init__(self) -> None:
        self._runners: dict[Key, Runner] = {}

    def __len__(self) -> int:
        return len(self._runners)

    def submit(self, sink: Sink, request: Request, runner: Runner) -> None:
        """Hand it to a runner. Raises RequestError: it can't be served, or its id is taken."""
        key = (sink, request.id)
        if key in self._runners:
            raise RequestError(409, "duplicate_request_id", f"a request with id {request.id!r} is running already")
        runner.submit(key, request)
        self._runners[key] = runner

    def cancel(self, sink: Sink, ids: Iterable[str] | None) -> None:
        """Without a Done; `ids` None means all of the sink. Unknown ones are ignored."""
        if ids is None:
            keys = [key for key in self._runners if key[0] is sink]
        else:
            keys = [key for key in ((sink, request_id) for request_id in ids) if key in self._runners]
        for key in keys:
            self._runners.pop(key).cancel(key)

    def abandon(self, runner: Runner, level: int, error: RequestError) -> list[Output]:
        """Cancel all that a runner has; what their clients are to be told."""
        keys = [key for key, owner in self._runners.items() if owner is runner]
        for key in keys:
            runner.cancel(key)
        return [(sink, failed(request_id, level, error)) for sink, request_id in keys]

    def fail_all(self, level: int, error: RequestError) -> None:
        """Tell every client; nothing more is computed."""
        self.deliver([(sink, failed(request_id, level, error)) for sink, request_id in list(self._runners)])

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Hand each sink its share of a step; only then are its ended requests over."""
        chunks: dict[Sink, list[Chunk]] = {}
        dones: dict[Sink, list[Done]] = {}
        for sink, output in outputs:
            if isinstance(output, Chunk):
                chunks.setdefault(sink, []).append(output)
            else:
                dones.setdefault(sink, []).append(output)
        for sink in {**chunks, **dones}:
            ended = dones.get(sink, [])
            try:
                sink.deliver(chunks.get(sink, []), ended)
            except Exception:
                log.exception("results can't be delivered: their requests are cancelled")
                self.cancel(sink, None)
            for done in ended:
                self._runners.pop((sink, done.id), None)
