"""The second half of the demo: what requests cost, waste and its ticket, a fault, the rollback and the recovery."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from stack import REPOSITORY, SYSTEM_NAMESPACE, Cluster, wait_ready
from watching import (
    ENGINE_SECONDS_A_REQUEST,
    FAST,
    SMALL_POD,
    WASTED_RATIO,
    Talk,
    Watched,
    chat,
    repeat_a_long_prompt,
)

NEWCOMER = "newcomer"
WORKLOAD_SECONDS = 24
SYSTEM_PROMPT = "I come with letters from the king, and with much news of the war. " * 64
"""What every conversation begins with, as the instructions of an assistant are."""
TEXTS = (
    "A moving, funny and beautifully acted film.",
    "Dull, clumsy and far too long: a waste of a good cast.",
    "Tender, wise and very well played.",
    "It has its moments, though not many of them.",
)
Typed = Callable[[str], None]


class ControlDemo:
    """Shows the control loop on the policy `assistant`, and on a new one that wastes."""

    def __init__(
        self, cluster: Cluster, console: Console, typed: Typed, heading: Typed, namespace: str, key: str
    ) -> None:
        self._cluster, self._console = cluster, console
        self._typed, self._heading = typed, heading
        self._namespace, self._key = namespace, key

    async def show(self, url: str) -> float:
        """All of it; returns the share of the cost of level 0 that level 3 saves."""
        assistant = Watched(self._cluster, self._namespace, "assistant")
        saved = await self._costs(assistant, url)
        await self._waste()
        await self._fault(assistant, url)
        self._report(assistant)
        return saved

    # -- what requests cost

    async def _costs(self, policy: Watched, url: str) -> float:
        self._heading("What a request costs: engine seconds x costPerHour, the same mixed traffic at level 0 and 3")
        per_hour = float(policy.cluster.get(self._namespace, "ipol", "assistant")["spec"]["engine"]["costPerHour"])  # type: ignore[index]
        costs = {}
        for level in (0, 3):
            policy.patch(rollbackLevel=level)
            await asyncio.to_thread(policy.wait, f"level {level} runs", lambda level=level: _runs(policy, level))  # type: ignore[misc]
            async with Talk(url, "assistant", converse_and_classify, clients=1, key=self._key) as talk:
                await asyncio.sleep(WORKLOAD_SECONDS)
                seconds = await asyncio.to_thread(policy.ask_prometheus, ENGINE_SECONDS_A_REQUEST)
            costs[level] = 1e6 * (seconds or 0.0) * per_hour / 3600
            self._console.print(
                f"  level {level}: {1000 * (seconds or 0):6.2f} ms of an engine a request,"
                f" {costs[level]:.3f} per million requests at {per_hour} an hour; {3 * talk.asked} requests"
            )
        saved = 1 - costs[3] / costs[0]
        self._console.print(f"  [bold]level 3 costs {100 * saved:.0f} % less[/] (goal 40 %)")
        quality = policy.condition("ShadowActive")
        self._console.print(f"  quality, watched meanwhile: ShadowActive={quality['status']} {quality['message']}")
        return saved

    # -- waste, a ticket, approval

    async def _waste(self) -> None:
        self._heading("A new policy, and traffic that begins alike: the waste becomes a ticket")
        policy = Watched(self._cluster, self._namespace, NEWCOMER)
        engine = {"accelerator": {"type": "CPU"}, "costPerHour": "0.08", "pod": SMALL_POD}
        keys = {"apiKeysSecretRef": {"name": "demo-api-keys"}}
        policy.apply(
            {
                "engine": engine,
                "gateway": {"replicas": 1, "pod": SMALL_POD, **keys},
                "generation": {"variantRef": {"name": "chat"}},
                "analysis": FAST,
            }
        )
        await asyncio.to_thread(wait_ready, self._cluster, self._namespace, NEWCOMER)
        with self._cluster.reach(self._namespace, f"{NEWCOMER}-gateway", 8000) as url:
            async with Talk(url, NEWCOMER, repeat_a_long_prompt, key=self._key):
                await asyncio.to_thread(policy.wait, "a ticket is open", policy.tickets)
                (ticket,) = policy.tickets()
                self._show_ticket(ticket)
                before = await _cost_and_waste(policy)
                name, patch = ticket["metadata"]["name"], json.dumps(ticket["spec"]["recommendation"]["patch"])
                self._typed(f'kubectl patch oticket {name} --type=merge -p \'{{"spec":{{"decision":"Approved"}}}}\'')
                self._cluster.patch(self._namespace, "oticket", name, {"spec": {"decision": "Approved"}})
                self._typed(f"kubectl patch ipol {NEWCOMER} --type=merge -p '{patch}'")
                self._cluster.patch(self._namespace, "ipol", NEWCOMER, json.loads(patch))
                await asyncio.to_thread(
                    policy.wait, "the ticket is resolved", lambda: _phase(policy) == "Resolved", 120
                )
                after = await _cost_and_waste(policy)
        table = Table(title="Before and after", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column)
        table.add_row("wasted FLOPs", f"{100 * before[0]:.0f} %", f"{100 * after[0]:.0f} %")
        table.add_row("engine time a request", f"{1000 * before[1]:.2f} ms", f"{1000 * after[1]:.2f} ms")
        self._console.print(table)
        self._typed(f"kubectl get oticket -n {self._namespace}")
        self._console.print(self._cluster.kubectl("get", "oticket", "-n", self._namespace), end="")
        self._cluster.kubectl("delete", "ipol", NEWCOMER, "-n", self._namespace, "--wait=false")

    def _show_ticket(self, ticket: dict[str, Any]) -> None:
        self._typed(f"kubectl get oticket -o wide -n {self._namespace}")
        self._console.print(self._cluster.kubectl("get", "oticket", "-o", "wide", "-n", self._namespace), end="")
        spec = ticket["spec"]
        evidence = spec["evidence"]
        self._console.print(
            f"  {spec['cause']}: {evidence['signal']} is {evidence['value']}, over {evidence['threshold']}"
            f" in {evidence['window']}\n  {spec['recommendation']['summary']}"
            f"\n  estimated saving: {spec.get('savingPerMonth', '?')} a month"
        )

    # -- a fault, the rollback, the recovery

    async def _fault(self, policy: Watched, url: str) -> None:
        self._heading("A fault: answers become too slow (a threshold that nothing can hold), and the level goes down")
        policy.patch(analysis={**FAST, "thresholds": []})
        await asyncio.to_thread(policy.wait, "level 3 runs", lambda: _runs(policy, 3))
        async with Talk(url, "assistant", chat, key=self._key) as talk:
            await asyncio.sleep(4)
            began = time.monotonic()
            policy.patch(analysis={**FAST, "thresholds": [{"signal": "RequestP95", "threshold": "0.000001"}]})
            await asyncio.to_thread(policy.wait, "a lower level runs", lambda: policy.level() < 3 and policy.applied())
            down = time.monotonic() - began
            self._console.print(f"  level {policy.level()} on every pod {down:.1f} s after the fault")
            policy.patch(analysis={**FAST, "thresholds": []})
            await asyncio.to_thread(policy.wait, "level 3 is back", lambda: _runs(policy, 3), 120)
            self._console.print(f"  level 3 again after {time.monotonic() - began - down:.1f} s of health")
        self._console.print(f"  {talk.asked} chats meanwhile, {len(talk.failed)} failed")
        self._typed(f"sixfold explain policy assistant -n {self._namespace}")
        for entry in policy.status()["history"][:4]:
            self._console.print(f"  {entry['at']}  {entry['decision']:<12} {entry['reason']}: {entry['message']}")

    # -- the report

    def _report(self, policy: Watched) -> None:
        self._heading("The report, for whoever pays the bill")
        page = Path(REPOSITORY) / ".cache" / "report.html"
        page.parent.mkdir(exist_ok=True)
        sixfold = str(REPOSITORY / ".venv" / "bin" / "sixfold")
        with self._cluster.reach(SYSTEM_NAMESPACE, "sixfold-prometheus", 9090) as url:
            arguments = (
                "report",
                "--prometheus",
                url,
                "--namespace",
                self._namespace,
                "--since",
                "15m",
                "-o",
                str(page),
            )
            self._typed(f"sixfold {' '.join(arguments)}")
            self._console.print(self._cluster.run(sixfold, *arguments), end="")
        self._console.print(f"  open {page}")


async def converse_and_classify(http: httpx.AsyncClient, model: str) -> str:
    """Two turns of a conversation and a batch of texts: three requests."""
    messages = [{"role": "user", "content": SYSTEM_PROMPT + str(time.monotonic_ns() % 1000)}]
    for question in ("What of the queen?", None):
        body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = await http.post("/v1/chat/completions", json=body)
        if not answer.is_success:
            return answer.text
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": question or ""})
    answer = await http.post("/v1/classify", json={"model": model, "input": list(TEXTS) * 4})
    return "" if answer.is_success else answer.text


async def _cost_and_waste(policy: Watched) -> tuple[float, float]:
    wasted = await asyncio.to_thread(policy.ask_prometheus, WASTED_RATIO)
    seconds = await asyncio.to_thread(policy.ask_prometheus, ENGINE_SECONDS_A_REQUEST)
    return wasted or 0.0, seconds or 0.0


def _phase(policy: Watched) -> str:
    return next((str(ticket.get("status", {}).get("phase")) for ticket in policy.tickets()), "")


def _runs(policy: Watched, level: int) -> bool:
    return policy.level() == level and policy.applied() and policy.status().get("effectiveLevel") == level
