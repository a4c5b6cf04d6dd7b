"""GPTQ checkpoints: made by GPTQModel, and mixed from two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sixfold_api.precision import Precision
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.prepare.artifact import copy_beside_weights, write_config, write_weights
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import CONFIG, read_json
from sixfold_runtime.prepare.layers import DEFAULT_DAMP_PERCENT, Plan, base_grid, dynamic

WORKER = "sixfold_runtime.prepare.gptq_worker"
CALIBRATION_TOKENS = 2048
"""Longest part of a sample that is used."""
_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 400


@dataclass(frozen=True)
class Made:
    """A checkpoint and the error that GPTQ reports for each linear: squared error of its output, a token."""

    folder: Path
    losses: dict[str, float]


def quantise(
    source: Path,
    target: Path,
    scratch: Path,
    plan: Plan,
    precision: Precision,
    calibration: Sequence[Sequence[int]],
) -> Made:
    """Quantise the model in `source` into `target` by the plan.

    Args:
        scratch: an empty folder for the process that does it.
        calibration: token ids of the samples.

    Raises PreparationError: UnsupportedPrecision where GPTQModel doesn't know the architecture, NonFiniteWeights,
    Unexpected with the end of its log.
    """
    base = base_grid(plan)
    config = {
        "bits": base.bits,
        "group_size": base.group_size,
        "desc_act": True if precision.desc_act is None else precision.desc_act,
        "sym": bool(precision.sym),
        "damp_percent": float(precision.damp_percent or DEFAULT_DAMP_PERCENT),
        "dynamic": dynamic(plan, base) or None,
        "pack_impl": "original",  # the others compile an extension at run time
    }
    result = scratch / "losses.json"
    request = {
        "source": str(source.resolve()),
        "target": str(target.resolve()),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "config": config,
        "calibration": [list(ids[:CALIBRATION_TOKENS]) for ids in calibration],
        "result": str(result.resolve()),
    }
    _run(request, scratch)
    losses = _losses(json.loads(result.read_text()), plan)
    copy_beside_weights(source, target)
    write_config(target, _quantization(config, json.loads((target / "quantize_config.json").read_text())))
    for name in ("quantize_config.json", "quant_log.csv"):
        (target / name).unlink(missing_ok=True)
    return Made(target, losses)


def _run(request: Mapping[str, Any], scratch: Path) -> None:
    (scratch / "request.json").write_text(json.dumps(request))
    log = scratch / "worker.log"
    environment = os.environ | {"TERM": "dumb", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log.open("wb") as output:
        code = subprocess.call(
            [sys.executable, "-m", WORKER, "request.json"],
            cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if code != 0:
        raise _explain(code, log.read_text(errors="replace"))


def _explain(code: int, log: str) -> PreparationError:
    lines = [line.strip() for line in log.replace("\r", "\n").splitlines() if line.strip()]
    end = lines[-1][:_SHOWN_CHARACTERS] if lines else "no output"
    sys.stderr.write("\n".join(line[:_SHOWN_CHARACTERS] for line in lines[-_SHOWN_LINES:]) + "\n")
    if code < 0:
        return PreparationError(
            Reason.UNEXPECTED, f"quantising was ended by signal {-code}: give preparation.pod more memory"
        )
    if "No space left" in log:
        return PreparationError(Reason.DISK_FULL, "the claim filled up while GPTQ ran: use a larger claim")
    if "not positive-definite" in log or "not positive definite" in log:
        return PreparationError(
            Reason.UNUSABLE_CALIBRATION,
            f"the calibration text leaves a layer without statistics ({end}): use more and more varied text",
        )
    if "isn't supported" in end or "not supported" in end or "Unsupported" in end:
        return PreparationError(Reason.UNSUPPORTED_PRECISION, f"GPTQ can't quantise this model: {end}")
    return PreparationError(Reason.UNEXPECTED, f"quantising failed: {end} (the Job's log has more)")


def _losses(rows: Sequence[Mapping[str, str]], plan: Plan) -> dict[str, float]:
    reported = {f".{row['layer']}.{row['module']}": row["loss"] for row in rows}
    losses = {}
    for name, grid in plan.items():
        text = next((loss for end, loss in reported.items() if name.endswith(end)), None)
        if grid is None:
            continue
        try:
            losses[name] = float(text or "")
        except ValueError as error:
            raise PreparationError(
                Reason.UNEXPECTED, f"GPTQModel reports {text!r} as the loss of {name} instead of a number"
            ) from error
        if losses[name] != losses[name] or losses[name] in (float("inf"), float("-inf")):
            raise PreparationError(
                Reason.NON_FINITE_WEIGHTS,
                f"quantising {name} gave {losses[name]}: the calibration text doesn't fit the model",
            )
    return losses


def _quantization(config: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """quantization_config of config.json: what readers of GPTQ checkpoints need, in AutoGPTQ's words."""
    return {
        "quant_method": "gptq",
        "bits": config["bits"],
        "group_size": config["group_size"],
        "desc_act": config["desc_act"],
        "sym": config["sym"],
        "damp_percent": config["damp_percent"],
        "lm_head": False,
        "checkpoint_format": written.get("checkpoint_format") or "gptq",
        "pack_dtype": written.get("pack_dtype") or "int32",
        "meta": {"quantizer": (written.get("meta") or {}).get("quantizer", [])},
    } | ({"dynamic": config["dynamic"]} if config["dynamic"] else {})


def mix(few: Path, most: Path, target: Path, raised: Collection[str], plan: Plan) -> None:
    """Write `few` to `target` with the raised linears as `most` has them; `plan` is what results."""
    stores = {False: TensorStore(few), True: TensorStore(most)}
    copy_beside_weights(few, target)
    write_weights(target, _mixed(stores, set(raised)))
    base = base_grid(plan)
    config = read_json(few / CONFIG)["quantization_config"]
    config |= {"bits": base.bits, "group_size": base.group_size, "dynamic": dynamic(plan, base)}
    write_config(target, config)


def _mixed(stores: Mapping[bool, TensorStore], raised: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(stores[False].names):
        yield name, stores[name.rpartition(".")[0] in raised].get(name)
