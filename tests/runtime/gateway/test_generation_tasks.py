"""X-Task on the generation endpoints: a dialogue may change its task from turn to turn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "assistant", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12},
    COMPLETIONS: {"model": "chat", "prompt": "hello", "max_tokens": 12},
}
SUBGRAPHS = {"tasks": [{"name": "verse"}, {"name": "prose"}], "onDemand": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    import torch
    from safetensors.torch import load_file

    from sixfold_runtime.engine.checkpoint import TensorStore
    from sixfold_runtime.engine.fingerprint import trunk_fingerprint
    from sixfold_runtime.engine.slice_file import slice_path, write_slice

    folder = Path(shutil.copytree(models / "chat", tmp_path_factory.mktemp("sliced") / "chat"))
    weights, fingerprint = load_file(folder / "model.safetensors"), trunk_fingerprint(TensorStore(folder))
    for seed, task in enumerate(("verse", "prose")):
        dice = torch.Generator().manual_seed(seed)
        name = "model.layers.1.mlp.down_proj.weight"
        noisy = weights[name] + torch.randn(weights[name].shape, generator=dice)
        write_slice(slice_path(folder, task), {name: noisy}, Task.GENERATION, [], fingerprint)
    return folder


@pytest.fixture(scope="module")
def front(folder: Path, shared_engine: Any, shared_gateway: Any) -> Any:
    engine = shared_engine(ServedModel(name="chat", task=Task.GENERATION, path=str(folder)))
    engine.apply(modes=("Subgraphs",), generationSubgraphs=SUBGRAPHS)
    gateway = shared_gateway(engine.port)
    gateway.apply(modes=("Subgraphs",), generationSubgraphs=SUBGRAPHS)
    return gateway


def text(gateway: Any, path: str, task: str | None = None, **more: Any) -> str:
    headers = {} if task is None else {"X-Task": task}
    response = gateway.client.post(path, json={**BODIES[path], "temperature": 0, **more}, headers=headers)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])


@pytest.mark.parametrize("path", BODIES)
def test_each_task_computes_with_its_slice(front: Any, path: str) -> None:
    plain, verse, prose = text(front, path), text(front, path, "verse"), text(front, path, "prose")
    assert len({plain, verse, prose}) == 3
    assert text(front, path, task="verse") == verse, "turns of a dialogue go to and fro"
    assert text(front, path) == plain
    assert front.client.post(path, json=BODIES[path] | {"task": "verse"}, headers={"X-Task": "verse"}).is_success


def test_a_stream_gives_the_same(front: Any) -> None:
    stream = front.openai().completions.create(
        **BODIES[COMPLETIONS], temperature=0, stream=True, extra_headers={"X-Task": "verse"}
    )
    assert "".join(event.choices[0].text for event in stream) == text(front, COMPLETIONS, "verse")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_unknown_tasks_are_refused_with_the_known_ones(front: Any, path: str, stream: bool) -> None:
    response = front.client.post(path, json=BODIES[path] | {"stream": stream}, headers={"X-Task": "poetry"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "task_not_found", "task")
    assert "verse, prose" in error["message"]
    response = front.client.post(path, json=BODIES[path] | {"task": "prose"}, headers={"X-Task": "verse"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "task")


def test_a_model_without_tasks_says_so(gateway: Any) -> None:
    response = gateway.client.post(CHAT, json=BODIES[CHAT], headers={"X-Task": "verse"})
    assert response.status_code == 404
    assert "has no tasks" in response.json()["error"]["message"]


def test_tasks_are_listed_and_counted(front: Any) -> None:
    text(front, COMPLETIONS, "prose")
    listed = {model["id"]: model["tasks"] for model in front.client.get("/v1/models").json()["data"]}
    tasks = [{"name": name, "task": "Generation", "labels": []} for name in ("verse", "prose")]
    assert listed == {"assistant": tasks, "chat": tasks}
    assert front.metric("sixfold_requests_total", slice="prose", task="Generation", outcome="ok") >= 1
    assert front.metric("sixfold_requests_total", slice="poetry") == 0
