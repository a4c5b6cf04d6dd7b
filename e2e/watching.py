"""A policy under the control loop's eyes: what demo and journeys do to it, and what they wait for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
from stack import JOURNEY_KEY, SYSTEM_NAMESPACE, Cluster, condition, wait_until
from traffic import stream_chat

FAST = {
    "interval": "2s",
    "initialDelay": "3s",
    "failureLimit": 3,
    "cooldown": "10s",
    "recoverAfter": "15s",
    "rejectWindow": "30m",
}
"""spec.analysis of a policy that is watched at short notice."""
SCRAPE_SECONDS, WINDOW_SECONDS = 1.0, 10.0
"""As e2e/monitoring.yaml has them."""
REACTION_GOAL_SECONDS = SCRAPE_SECONDS + WINDOW_SECONDS + 3 * 2.0 + 2.0
SMALL_POD = {"resources": {"requests": {"cpu": "100m", "memory": "256Mi"}}}


class Watched:
    """One policy in a cluster."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    def apply(self, spec: dict[str, Any]) -> None:
        document = {
            "apiVersion": "sixfold.dev/v1alpha1",
            "kind": "InferencePolicy",
            "metadata": {"name": self.name},
            "spec": spec,
        }
        self.cluster.apply(self.namespace, document)

    def patch(self, **spec: Any) -> None:
        self.cluster.patch(self.namespace, "ipol", self.name, {"spec": spec})

    def status(self) -> dict[str, Any]:
        found = self.cluster.get(self.namespace, "ipol", self.name) or {}
        return found.get("status") or {}

    def condition(self, type_: str) -> dict[str, Any]:
        return condition({"status": self.status()}, type_)

    def mode(self, name: str) -> str:
        return next((mode["state"] for mode in self.status().get("modes", []) if mode["name"] == name), "Absent")

    def level(self) -> int:
        return int(self.status().get("level", {}).get("target", -1))

    def history(self) -> str:
        """The last decisions, for people who read a failure."""
        entries = self.status().get("history", [])
        return "\n".join(
            f"{entry['at']} {entry['decision']} {entry['reason']}: {entry['message']}" for entry in entries
        )

    def tickets(self) -> list[dict[str, Any]]:
        found = self.cluster.list(self.namespace, "optimizationtickets")
        return [ticket for ticket in found if ticket["spec"]["policyRef"]["name"] == self.name]

    def wait(self, what: str, check: Callable[[], Any], timeout_seconds: float = 90) -> Any:
        try:
            return wait_until(f"{self.name}: {what}", check, timeout_seconds, 0.1)
        except TimeoutError as problem:
            signals = json.dumps(self.status().get("signals", []))
            raise TimeoutError(f"{problem}\n{self.history()}\n{signals}") from problem

    def ask_prometheus(self, query: str) -> float | None:
        """The value of PromQL with one series; `$where` stands for this policy. None where there is none."""
        query = query.replace("$where", f'namespace="{self.namespace}", policy="{self.name}"')
        with self.cluster.reach(SYSTEM_NAMESPACE, "sixfold-prometheus", 9090) as url:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).raise_for_status()
        found = answer.json()["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    def applied(self) -> bool:
        """Whether every pod runs what was decided."""
        config = self.status().get("config") or {}
        return bool(config) and config["pods"] > 0 and config["applied"] == config["pods"]


class Talk:
    """Asks in the background until it is left."""

    def __init__(
        self,
        url: str,
        model: str,
        ask: Callable[[httpx.AsyncClient, str], Any],
        clients: int = 2,
        key: str = JOURNEY_KEY,
    ) -> None:
        self._url, self._model, self._ask, self._clients, self._key = url, model, ask, clients, key
        self.asked, self.failed = 0, []
        self._stopping = False

    async def __aenter__(self) -> Talk:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(base_url=self._url, headers=headers, timeout=60) as http:
            while not self._stopping:
                try:
                    if error := await self._ask(http, self._model):
                        self.failed.append(error)
                except httpx.HTTPError as problem:
                    self.failed.append(repr(problem))
                self.asked += 1
                await asyncio.sleep(0.05)


async def chat(http: httpx.AsyncClient, model: str) -> str:
    """A short streamed chat; the error, if there is one."""
    key = http.headers["Authorization"].removeprefix("Bearer ")
    return (await stream_chat(http, key, model, "What news from the court?", 24)).error


async def repeat_a_long_prompt(http: httpx.AsyncClient, model: str) -> str:
    """The same long beginning again and again, for a few tokens."""
    beginning = "Good morrow, my lord. I come with letters from the king, and with much news of the war. " * 12
    body = {"model": model, "prompt": beginning + str(time.monotonic()), "max_tokens": 8, "temperature": 0}
    answer = await http.post("/v1/completions", json=body)
    return "" if answer.is_success else answer.text


async def classify(http: httpx.AsyncClient, model: str) -> str:
    texts = [
        "It has its moments, though not many.",
        "Dull and clumsy.",
        "Funny, if far too long.",
        "Why was this made?",
    ]
    answer = await http.post("/v1/classify", json={"model": model, "input": texts})
    return "" if answer.is_success else answer.text


_WASTED = 'sum(increase(sixfold_flops_total{$where, outcome="wasted"}[20s]))'
WASTED_RATIO = f"{_WASTED} / sum(increase(sixfold_flops_total{{$where}}[20s]))"
ENGINE_SECONDS_A_REQUEST = (
    "sum(increase(sixfold_request_engine_seconds_sum{$where}[20s]))"
    " / sum(increase(sixfold_request_engine_seconds_count{$where}[20s]))"
)
