"""The report beside the weights, and a table of it for the Job's log."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sixfold_runtime.prepare.files import REPORT

_WORST = 12
_WIDTH = 120


def write(content: Mapping[str, Any], folder: Path) -> str:
    """Write the report; what keeps it from being written, "" if nothing does."""
    partial = folder / f".{REPORT}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False))
        partial.rename(folder / REPORT)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Tables of the tries and of the layers that lose most."""
    console = console or Console(stderr=True, width=_WIDTH, highlight=False)
    console.print(_tries(content["tries"]))
    console.print(_layers(content["layers"]))
    kernels = content["kernels"]
    console.print(
        f"bytes {content['bytesBefore']} -> {content['bytesAfter']}; kernels on this {kernels['device']}: "
        + ", ".join(f"{count} {name}" for name, count in kernels["kernels"].items())
        + (f"; {kernels['problem']}" if kernels["problem"] else ""),
        soft_wrap=True,
    )


def _tries(tries: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Tries", title_justify="left", box=None)
    for column in ("try", "layers", "bytes", "source", "prepared", "loss", "KL", "seconds"):
        table.add_column(column, justify="left" if column in ("try", "layers") else "right")
    for tried in tries:
        divergence = f"{tried['kl']:.5f}" if "kl" in tried else ""
        table.add_row(
            tried["try"], tried["layers"], str(tried["bytes"]), f"{tried['source']:.4f}", f"{tried['prepared']:.4f}",
            f"{tried['loss']:.3f}", divergence, f"{tried['seconds']:.0f}",
        )  # fmt: skip
    return table


def _layers(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Shares are of the values that enter a layer; see saturation.py."""
    ranked = sorted(layers, key=lambda layer: -layer.get("outputError", 0.0))
    title = f"The {min(_WORST, len(layers))} of {len(layers)} layers with the largest output error"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("layer", "bits", "output error", "beyond calibration", "lost to INT8"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for layer in ranked[:_WORST]:
        beyond = f"{layer['beyondCalibration']:.4%}" if "beyondCalibration" in layer else ""
        error, lost = layer.get("outputError"), layer.get("lostToInt8")
        table.add_row(
            layer["name"], str(layer.get("bits", "full")), "" if error is None else f"{error:.4g}", beyond,
            "" if lost is None else f"{lost:.2%}",
        )  # fmt: skip
    return table
