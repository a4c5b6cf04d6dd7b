"""`make demo`: the whole way once, on the cluster at hand, with what a user would type and see."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from control import ControlDemo
from levels import LevelMeter, Move
from serving import show_conversation, show_streams
from stack import (
    REPOSITORY,
    Cluster,
    CommandError,
    bring_up,
    condition,
    fill_models_claim,
    is_ready,
    model_folders,
    wait_until,
)
from traffic import PROMPTS, Traffic, events_of, stream_chat

NAMESPACE = "sixfold-demo"
POLICY = "assistant"
KEY = "sixfold-demo-alice"
LEVELS = (0, 3, 1, 3)
PATCH = f"""kubectl patch ipol {POLICY} -n {NAMESPACE} --type=merge -p '{{"spec":{{"rollbackLevel":%d}}}}'"""
CURL = f"""curl -N localhost:8000/v1/chat/completions -H 'Authorization: Bearer {KEY}' \\
    -H 'Content-Type: application/json' \\
    -d '{{"model": "{POLICY}", "stream": true, "messages": [{{"role": "user", "content": "Who is there?"}}]}}'"""
console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    started = time.monotonic()
    try:
        cluster = bring_up(NAMESPACE)
        apply_examples(cluster)
        with cluster.reach(NAMESPACE, f"{POLICY}-gateway", 8000) as url:
            asyncio.run(show(cluster, url, started))
    except (CommandError, TimeoutError, subprocess.CalledProcessError) as problem:
        console.print(f"\n[bold red]The demo stopped:[/] {problem}")
        console.print(f"Look at: kubectl get sixfold -n {NAMESPACE}; kubectl get events -n {NAMESPACE}")
        raise SystemExit(1) from problem


def heading(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def typed(command: str) -> None:
    console.print(f"[cyan]$ {command}[/]")


def apply_examples(cluster: Cluster) -> None:
    """The examples in a namespace of their own, and the wait until the policy is Ready, with its own words."""
    heading("Applying examples/")
    fill_models_claim(NAMESPACE, model_folders())
    typed(f"kubectl apply -n {NAMESPACE} -f examples/")
    console.print(cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(REPOSITORY / "examples")), end="")
    cluster.patch(NAMESPACE, "ipol", POLICY, {"spec": {"rollbackLevel": 3}})  # an earlier demo may have moved it
    said = ""
    with console.status("waiting for the policy to be Ready") as status:

        def ready() -> bool:
            nonlocal said
            now = condition(cluster.get(NAMESPACE, "ipol", POLICY), "Ready")
            words = f"Ready={now['status']} {now['reason']}: {now['message']}"
            if words != said and now["status"] != "Absent":
                said = words
                status.console.print(f"  {words}")
            return is_ready(cluster, NAMESPACE, POLICY)

        wait_until("the policy is Ready", ready, timeout_seconds=900)
    typed(f"kubectl get sixfold -n {NAMESPACE}")
    console.print(cluster.kubectl("get", "sixfold", "-n", NAMESPACE), end="")


async def show(cluster: Cluster, url: str, started: float) -> None:
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
        await show_chat(http)
        heading("A conversation: what was computed once is found again, by whichever engine")
        await show_conversation(console, http, POLICY)
        heading("One answer in each form of a stream")
        await show_streams(console, http, POLICY)
        await show_classification(http)
        await show_refusals(http)
        await show_costs(cluster, http)
    moves, traffic = await move_levels(cluster, url)
    saved = await ControlDemo(cluster, console, typed, heading, NAMESPACE, KEY).show(url)
    summary(moves, traffic, saved, time.monotonic() - started, cluster.environment["KUBECONFIG"])


async def show_chat(http: httpx.AsyncClient) -> None:
    heading("A streamed chat")
    question = "What news from the court?"
    console.print(f"[dim]user:[/] {question}\n[dim]assistant:[/] ", end="")
    body = {
        "model": POLICY,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": 120,
        "temperature": 0.6,
        "seed": 7,
        "stream_options": {"include_usage": True},
    }
    usage = {}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for event in events_of(answer):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                console.out(choice["delta"].get("content") or "", end="")
        headers = answer.headers
    console.print(
        f"\n[dim]{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, level "
        f"{headers['x-sixfold-level']}, Content-Encoding: {headers.get('content-encoding', 'identity')}[/]"
    )


async def show_classification(http: httpx.AsyncClient) -> None:
    heading("Classification: no decoding loop, and no layer more than a text needs")
    texts = (
        "A moving, funny and beautifully acted film.",
        "Dull, clumsy and far too long: a waste of a good cast.",
        "It has its moments, though not many of them, and an ending that I did not see coming.",
    )
    for item, text in zip(await classify(http, texts), texts, strict=True):
        left = f"left after layer {item['layers']}" if item["exited"] else f"ran through all {item['layers']} layers"
        console.print(f"  {item['label']:>9}  {item['score']:.3f}  {left:<26} {text}")
        if item.get("escalated"):
            console.print(f"             [dim]unsure, so the generating model was asked:[/] {item['answer']!r}")
    heading("Other tasks on the same layers, by the header X-Task")
    (item,) = await classify(http, ["a large cat with a tawny coat and black stripes"], "category")
    console.print(f"  category: {item['label']} {item['score']:.3f}")
    (item,) = await classify(http, ["The old dog quickly ran home"], "pos")
    console.print("  pos: " + ", ".join(f"{word['text']} {word['label']}" for word in item["tokens"]))


async def classify(http: httpx.AsyncClient, texts: Sequence[str], task: str = "") -> list[dict[str, Any]]:
    headers = {"X-Task": task} if task else {}
    answer = await http.post("/v1/classify", json={"model": POLICY, "input": list(texts)}, headers=headers)
    items: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
    return items


async def show_refusals(http: httpx.AsyncClient) -> None:
    heading("What a mistake looks like")
    for what, headers, body in (
        ("a wrong key", {"Authorization": "Bearer nobody"}, {"messages": [{"role": "user", "content": "Hi"}]}),
        ("no messages", {}, {"messages": []}),
        ("max_tokens: 0", {}, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}),
    ):
        answer = await http.post("/v1/chat/completions", json={"model": POLICY, **body}, headers=headers)
        console.print(f"  {what:>14}  HTTP {answer.status_code}  {answer.json()['error']['message']}")


async def show_costs(cluster: Cluster, http: httpx.AsyncClient) -> None:
    heading("What a level costs: the same greedy answer at each")
    typed(f"kubectl get mvar -o wide -n {NAMESPACE}")
    console.print(cluster.kubectl("get", "mvar", "-o", "wide", "-n", NAMESPACE), end="")
    meter = LevelMeter(cluster, NAMESPACE, POLICY)
    for level in range(4):
        typed(PATCH % level)
        await asyncio.to_thread(meter.move, level)
        usages, seconds = [], []
        for question in PROMPTS:
            body = {"model": POLICY, "messages": [{"role": "user", "content": question}], "max_tokens": 96}
            started = time.monotonic()
            answer = await http.post("/v1/chat/completions", json={**body, "temperature": 0})
            seconds.append(time.monotonic() - started)
            usages.append(answer.raise_for_status().json()["usage"])
        tokens = sum(usage["completion_tokens"] for usage in usages)
        details = [usage.get("completion_tokens_details") or {} for usage in usages]
        accepted = sum(detail.get("accepted_prediction_tokens", 0) for detail in details)
        rejected = sum(detail.get("rejected_prediction_tokens", 0) for detail in details)
        drafts = f"{accepted} of {accepted + rejected} drafted tokens accepted" if accepted + rejected else "no drafts"
        weights = engine_weights(cluster)
        console.print(f"  level {level}: {tokens / sum(seconds):5.0f} tokens/s, weights {weights}, {drafts}")


def engine_weights(cluster: Cluster) -> str:
    """Name of the variant whose weights new requests get, as the engine's pod says."""
    selector = f"sixfold.dev/policy={POLICY},sixfold.dev/component=engine"
    (pod,) = cluster.list(NAMESPACE, "pods", selector)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:8001/proxy/state"
    return str(json.loads(cluster.kubectl("get", "--raw", path))["models"][0]["weights"])


async def move_levels(cluster: Cluster, url: str) -> tuple[list[Move], Traffic]:
    heading("Levels move while eight clients stream")
    meter, moves = LevelMeter(cluster, NAMESPACE, POLICY), []
    async with Traffic(url, KEY, POLICY) as traffic, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for level in LEVELS:
            typed(PATCH % level)
            moves.append(await asyncio.to_thread(meter.move, level))
            probe = await stream_chat(http, KEY, POLICY, "And now?", 16)
            console.print(
                f"  {moves[-1].pods} pods report level {level} after {moves[-1].reported_seconds:.2f} s; "
                f"a new request runs at level {probe.level}, Content-Encoding: {probe.encoding}"
            )
    return moves, traffic


def summary(moves: list[Move], traffic: Traffic, saved: float, seconds: float, kubeconfig: str) -> None:
    table = Table(title="\nWhat happened", show_header=False, title_justify="left")
    table.add_row("level changes", f"{len(moves)}, slowest {max(m.reported_seconds for m in moves):.2f} s")
    table.add_row("streamed chats meanwhile", f"{len(traffic.outcomes)}, failed {len(traffic.failed)}")
    table.add_row("cost of a request at level 3 against level 0", f"- {100 * saved:.0f} %")
    table.add_row("whole demo", f"{seconds:.0f} s")
    console.print(table)
    for outcome in traffic.failed[:3]:
        console.print(f"[red]{outcome.error}[/]")
    heading("What to try next")
    console.print(f"  export KUBECONFIG={kubeconfig}")
    typed(f"kubectl get ipol,mvar,oticket,pods -n {NAMESPACE}")
    typed(f"kubectl describe ipol {POLICY} -n {NAMESPACE}")
    typed(f".venv/bin/sixfold explain policy {POLICY} -n {NAMESPACE}")
    typed(f"kubectl port-forward -n {NAMESPACE} svc/{POLICY}-gateway 8000")
    typed("xdg-open http://localhost:8000   # a page to chat with it; the key is " + KEY)
    typed(CURL)
    typed("make demo-down   # removes all of it")
    if traffic.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
