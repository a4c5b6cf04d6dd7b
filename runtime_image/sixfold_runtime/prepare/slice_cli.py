"""`sixfold prepare slice cut` and `sixfold prepare slice train`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sixfold_api.scalars import OUR_NAME_PATTERN, Task
from sixfold_api.subgraphs import DEFAULT_ADAPTER_LAYERS, DEFAULT_ADAPTER_WIDTH, AdapterShape
from sixfold_api.variant import PERMANENT_FAILURE_EXIT_CODE
from sixfold_runtime.engine.slice_file import slice_path
from sixfold_runtime.logs import quiet_torchao
from sixfold_runtime.prepare.artifact import explained
from sixfold_runtime.prepare.failures import PreparationError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Task slices: what a task has of its own over a trunk that it shares with others.",
)
_Trunk = Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the shared weights.")]
_Name = Annotated[str, typer.Option("--task", help="The task, as X-Task will name it.")]
_Out = Annotated[
    Path | None, typer.Option(help="The file; absent means slices/TASK.safetensors in the trunk's folder.")
]


@app.command()
def cut(
    trunk: _Trunk,
    checkpoint: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the tuned model.")],
    task: _Name,
    kind: Annotated[Task | None, typer.Option(help="What it does; absent means what the checkpoint is for.")] = None,
    out: _Out = None,
) -> None:
    """Cut a slice out of a model that was tuned from the trunk for one task. Its logits stay the same."""
    from sixfold_runtime.prepare import slice_cut

    target = _target(trunk, task, out)
    with _told(target):
        slice_cut.cut(trunk, checkpoint, target, _log, kind)


@app.command()
def train(
    trunk: _Trunk,
    text: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="JSON lines: text and label, or tokens and labels.")
    ],
    task: _Name,
    kind: Annotated[Task, typer.Option(help="What it does.")] = Task.CLASSIFICATION,
    evaluation: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Held-out text; absent holds out a tenth.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Labels in the head's order; absent means all, sorted.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Use so many lines of the text, the first ones.")] = None,
    adapter_width: Annotated[int, typer.Option(min=1, max=4096, help="Of the bottlenecks.")] = DEFAULT_ADAPTER_WIDTH,
    adapter_layers: Annotated[
        int, typer.Option(min=1, max=256, help="How many of the last layers.")
    ] = DEFAULT_ADAPTER_LAYERS,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=0, help="The highest.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Of the order and of the first weights.")] = 0,
    out: _Out = None,
) -> None:
    """Train adapters and a head for one task over the trunk, which stays as it is."""
    from sixfold_runtime.engine.device import set_threads
    from sixfold_runtime.prepare import slice_train

    set_threads()
    adapter = AdapterShape(width=adapter_width, layers=adapter_layers)
    target = _target(trunk, task, out)
    with _told(target):
        done = slice_train.train(
            trunk,
            text,
            target,
            kind,
            _log,
            evaluation=evaluation,
            labels=label or (),
            limit=samples,
            recipe=slice_train.Recipe(adapter, epochs, learning_rate, seed=seed),
        )
    report = done.report
    _log(f"{report.name}: {report.size_bytes} bytes, {done.after} of {done.after.samples}, {done.seconds:.0f} s")


def _target(trunk: Path, task: str, out: Path | None) -> Path:
    if re.fullmatch(OUR_NAME_PATTERN, task) is None:
        raise typer.BadParameter(
            "lower-case letters, digits and dashes, a letter first, at most 40", param_hint="--task"
        )
    if out is not None and out.name != f"{task}.safetensors":
        raise typer.BadParameter(f"the file of the task {task} is called {task}.safetensors", param_hint="--out")
    return out or slice_path(trunk, task)


@contextmanager
def _told(target: Path) -> Iterator[None]:
    quiet_torchao()
    try:
        with explained(target):
            yield
    except PreparationError as error:
        _log(f"{error.reason}: {error}")
        raise typer.Exit(PERMANENT_FAILURE_EXIT_CODE) from error


def _log(line: str) -> None:
    typer.echo(line, err=True)
