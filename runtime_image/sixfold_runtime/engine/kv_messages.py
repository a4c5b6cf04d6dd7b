"""What gateways ask about kept keys and values, beside requests."""

from __future__ import annotations

from collections.abc import Callable

from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.protocol import Erase, Erased, Prefetch


def prefetch(engine: Engine, message: Prefetch) -> None:
    """Bring near what was kept of a conversation, if the model is there and keeps anything."""

    def begin() -> None:
        model = engine.models.get(message.model)
        if model is not None and model.weights is not None and (kv := model.weights.kv) is not None:
            kv.prefetch(message.tenant, message.conversation)

    engine.call(begin)


def erase(engine: Engine, message: Erase, done: Callable[[Erased], None]) -> None:
    """Forget the keys and values of a tenant, and keep none of what is being computed for it.

    Args:
        done: called in any thread when they are gone.
    """

    def end(blocks: int, error: str) -> None:
        done(Erased(message.id, blocks, error))

    def begin() -> None:
        for model in engine.models.values():
            if model.weights is not None:
                model.weights.keep_nothing_of(message.tenant)
        if engine.shelf is None:
            end(0, "")
        else:
            engine.shelf.store.erase(engine.shelf.salt(message.tenant), end)

    engine.call(begin)
