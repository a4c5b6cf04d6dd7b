"""Reading /state of pods over their pod IPs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp
from pydantic import ValidationError

from sixfold_api.names import COMPONENT_LABEL, ENGINE_PORT, GATEWAY, GATEWAY_PORT
from sixfold_api.runtime_config import PodState

log = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=1.0)
PARALLEL = 64


class PodStates:
    """One client for all pods. A pod that doesn't answer in a second, or not with a state, has none."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(PARALLEL)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def read(self, pods: Iterable[dict[str, Any]]) -> dict[str, PodState]:
        """Pod name -> what it reports, for the pods that answer."""
        addressed = [pod for pod in pods if pod.get("status", {}).get("podIP")]
        states = await asyncio.gather(*map(self._read_one, addressed))
        names = [pod["metadata"]["name"] for pod in addressed]
        return {name: state for name, state in zip(names, states, strict=True) if state is not None}

    async def _read_one(self, pod: dict[str, Any]) -> PodState | None:
        if self._session is None:
            # Pods are reached directly, whatever proxy the environment names for the world outside.
            self._session = aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False)
        component = pod["metadata"].get("labels", {}).get(COMPONENT_LABEL)
        port = GATEWAY_PORT if component == GATEWAY else ENGINE_PORT
        address = pod["status"]["podIP"]
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._slots, self._session.get(f"http://{host}:{port}/state") as response:
                if response.status != 200:
                    return None
                return PodState.model_validate_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            log.debug("no state from pod %s: %r", pod["metadata"]["name"], error)
            return None
