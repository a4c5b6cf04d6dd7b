"""The engines that this gateway knows: found by name, connected, and chosen from for each request."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import PATH, SUBPROTOCOL, MissingModel, ModelInfo, State, TaskInfo
from sixfold_runtime.gateway.addresses import Address, authority, parse_target, resolve
from sixfold_runtime.gateway.affinity import conversation_key, nearest
from sixfold_runtime.gateway.session import PROTOCOL_ERRORS, Session
from sixfold_runtime.gateway.tokenizer import ModelTokenizer
from sixfold_runtime.gateway.tokenizer_cache import Source, TokenizerCache
from sixfold_runtime.http_server import MAX_FRAME_BYTES

log = logging.getLogger(__name__)
RESOLVE_SECONDS = 1.0
ERASE_SECONDS = 30.0
"""How long an engine may take to erase what it keeps of a tenant."""
BACK_OFF_SECONDS = (0.1, 2.0)
"""First and longest pause before a new try."""


@dataclass(frozen=True)
class Choice:
    """An engine for one request, with the model's facts and its tokenizer."""

    session: Session
    model: ModelInfo
    tokenizer: ModelTokenizer

    @property
    def pod(self) -> str:
        return self.session.state.pod if self.session.state is not None else ""


def choose(choices: Iterable[Choice]) -> Choice | None:
    """The engine with the fewest requests of this gateway in flight; of equals the one that waited longest.

    One whose weights are being exchanged comes last.
    """

    def rank(choice: Choice) -> tuple[bool, int, int]:
        return choice.model.swapping, choice.session.in_flight, choice.session.last_used

    return min(choices, key=rank, default=None)


def swap_turns(states: Sequence[State]) -> dict[str, int]:
    """For each model the engine, as an index, whose turn it is to exchange its weights.

    That is the first pod by name that waits for it, while none is in the middle of it. Every gateway that is told the
    same comes to the same answer.
    """
    models = [(state.pod, index, model) for index, state in enumerate(states) for model in state.models]
    busy = {model.name for _, _, model in models if model.swapping}
    waiting = [(pod, index, m.name) for pod, index, m in models if m.swap_pending and m.name not in busy]
    return {name: index for _, index, name in sorted(waiting, reverse=True)}


class Pool:
    """Connections to every pod of every target."""

    def __init__(self, targets: Sequence[str], alias: str, tls: ssl.SSLContext | None = None) -> None:
        """
        Args:
            targets: `host:port`; raises ValueError. With `tls` an engine's certificate names the host.
            alias: the stable name of whatever is served.
            tls: proves this gateway to the engines; None speaks in the clear.
        """
        self._targets = {target: parse_target(target) for target in targets}
        self._alias = alias
        self._tls = tls
        self._links: dict[tuple[str, Address], asyncio.Task[None]] = {}
        self._sessions: dict[Session, tuple[str, Address]] = {}
        self._tokenizers = TokenizerCache(self._sources, self._on_change, tls)
        self._answered: set[str] = set()
        self._known: dict[str, ModelInfo] = {}
        self._changed = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call it whenever an engine came, left or said something new, and when a tokenizer arrived."""
        self._callbacks.append(callback)

    # -- what there is

    @property
    def models(self) -> list[ModelInfo]:
        """Models of the connected engines; for a task that no engine serves now, those served last."""
        return list(self._known.values())

    @property
    def missing(self) -> list[MissingModel]:
        """Models that an engine is there for and no engine has loaded so far."""
        states = [session.state for session in self._sessions if session.state is not None]
        found = {model.name: model for state in states for model in state.missing}
        return [model for name, model in found.items() if name not in self._known]

    @property
    def connected(self) -> int:
        return len(self._sessions)

    @property
    def ready(self) -> int:
        """Connected engines that take requests for all their models."""
        return sum(self._is_ready(session) for session in self._sessions)

    def is_ready(self, model: ModelInfo) -> bool:
        return any(choice.model.name == model.name for choice in self.choices(lambda _: True))

    @property
    def waiting_for(self) -> list[str]:
        """Targets that have not been ready once."""
        return [target for target in self._targets if target not in self._answered]

    @property
    def is_introduced(self) -> bool:
        """Whether every target has said which models it is there for."""
        said = {target for session, (target, _) in self._sessions.items() if session.state is not None}
        return said | self._answered >= self._targets.keys()

    def tasks(self, name: str, task: Task) -> dict[str, TaskInfo]:
        """Task slices of a model that some engine offers, by name."""
        states = [session.state for session in self._sessions if session.state is not None]
        models = [*self.models, *(model for state in states for model in state.models)]
        return {info.name: info for model in models if self.matches(model, name, task) for info in model.tasks}

    def matches(self, model: ModelInfo | MissingModel, name: str, task: Task) -> bool:
        """Whether the endpoint for `task` may ask this model by that name; what labels tokens classifies too."""
        generates = model.task == Task.GENERATION
        return generates == (task is Task.GENERATION) and name in (model.name, self._alias)

    async def pick(
        self, wanted: Callable[[ModelInfo], bool], exclude: Sequence[Session], timeout_seconds: float
    ) -> Choice | None:
        """An engine that serves such a model now, or gets ready to within the timeout; else None."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    choice = choose(self.choices(wanted, exclude))
                    if choice is not None:
                        return choice
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None

    def prefetch(self, name: str, tenant: str, conversation: str) -> None:
        """Tell the engine that a request of this conversation will go to, if any keeps keys and values."""
        choices = {
            choice.pod: (choice.session, choice.model.name)
            for choice in self.choices(lambda model: model.kv_block_tokens > 0)
            if self.matches(choice.model, name, Task.GENERATION)
        }
        pod = nearest(conversation_key(tenant, conversation), choices)
        if pod is not None:
            session, model_name = choices[pod]
            session.prefetch(model_name, tenant, conversation)

    async def erase(self, tenant: str) -> tuple[int, list[str]]:
        """Have all connected engines forget a tenant's keys and values.

        Returns:
            how many blocks were removed, and why some may be left, for people.
        """
        answers = await asyncio.gather(*(session.erase(tenant, ERASE_SECONDS) for session in self._sessions))
        return sum(answer.blocks for answer in answers), [answer.error for answer in answers if answer.error]

    def choices(self, wanted: Callable[[ModelInfo], bool], exclude: Collection[Session] = ()) -> Iterable[Choice]:
        """Engines that serve such a model now."""
        for session in self._sessions:
            if session in exclude or not session.is_open or session.state is None or session.state.draining:
                continue
            for model in session.state.models:
                tokenizer = self._tokenizers.get(model.tokenizer)
                if model.ready and tokenizer is not None and wanted(model):
                    yield Choice(session, model, tokenizer)

    def _is_ready(self, session: Session) -> bool:
        state = session.state
        return (
            state is not None
            and bool(state.models)
            and not state.missing
            and not state.draining
            and all(model.ready and self._tokenizers.get(model.tokenizer) is not None for model in state.models)
        )

    # -- how it comes about

    async def run(self) -> None:
        """Keep connections to all pods until cancelled."""
        try:
            while True:
                await asyncio.gather(*(self._follow(target) for target in self._targets))
                await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            for task in self._links.values():
                task.cancel()
            await asyncio.gather(*self._links.values(), return_exceptions=True)
            await self._tokenizers.close()

    async def _follow(self, target: str) -> None:
        """Start a link to each new pod. One that left the name keeps its link while the socket lives."""
        addresses = await resolve(self._targets[target])
        if addresses is None:
            return
        for key in [key for key, task in self._links.items() if task.done()]:
            del self._links[key]
        for address in addresses:
            if (target, address) not in self._links:
                self._links[target, address] = asyncio.create_task(self._link(target, address))

    async def _link(self, target: str, address: Address) -> None:
        """Connect, and again after each loss, for as long as the name leads to the address."""
        first, longest = BACK_OFF_SECONDS
        pause = first
        while True:
            try:
                if await self._session(target, address):
                    pause = first
            except (OSError, TimeoutError, WebSocketException) as error:
                log.info("engine %s: %s", authority(address), error or type(error).__name__)
            except PROTOCOL_ERRORS as error:
                log.error("engine %s sent what this gateway can't read: %s", authority(address), error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(longest, pause * 2)
            addresses = await resolve(self._targets[target])
            if addresses is not None and address not in addresses:
                return

    async def _session(self, target: str, address: Address) -> bool:
        """One connection from start to end; True if the engine introduced itself."""
        async with connect(
            f"{'wss' if self._tls else 'ws'}://{authority(address)}{PATH}",
            ssl=self._tls,
            server_hostname=self._targets[target][0] if self._tls else None,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            proxy=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=None,
            open_timeout=5,
            close_timeout=1,
            ping_interval=5,
            ping_timeout=20,
        ) as websocket:
            session = Session(websocket, self._on_change)
            self._sessions[session] = (target, address)
            log.info("engine %s connected", authority(address))
            try:
                await session.run()
            finally:
                del self._sessions[session]
                self._on_change()
                log.info("engine %s disconnected", authority(address))
            return session.state is not None

    def _sources(self, tokenizer: str) -> list[Source]:
        """The engines with a model that needs this tokenizer."""
        scheme = "https" if self._tls else "http"
        return [
            Source(f"{scheme}://{authority(address)}", self._targets[target][0])
            for session, (target, address) in self._sessions.items()
            if session.state is not None and any(model.tokenizer == tokenizer for model in session.state.models)
        ]

    def _on_change(self) -> None:
        """An engine said something new, came or left, or a tokenizer arrived: wake requests that wait for it."""
        live = {m.name: m for s in self._sessions if s.state is not None for m in s.state.models}
        tasks = {model.task for model in live.values()}
        self._known = live | {n: m for n, m in self._known.items() if n not in live and m.task not in tasks}
        for model in live.values():
            self._tokenizers.want(model.tokenizer)
        waited = bool(self.waiting_for)
        self._answered |= {target for session, (target, _) in self._sessions.items() if self._is_ready(session)}
        if waited and not self.waiting_for:
            log.info("ready for requests: %s", ", ".join(self._known))
        told = [(session, session.state) for session in self._sessions if session.state is not None]
        for name, index in swap_turns([state for _, state in told]).items():
            told[index][0].give_turn(name)
        self._changed.set()
        for callback in self._callbacks:
            callback()
