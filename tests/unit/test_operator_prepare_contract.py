"""The Job's command line is one that `sixfold prepare` takes: written in the operator, read in the runtime."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from pydantic import TypeAdapter
from typer.main import get_command

from sixfold_api.exit_heads import ExitHeads
from sixfold_api.subgraphs import SliceSpec
from sixfold_api.variant import ModelVariantSpec
from sixfold_operator.builders.job import Inputs, preparation_job
from sixfold_operator.settings import OperatorSettings
from sixfold_runtime.prepare.cli import prepare

SETTINGS = OperatorSettings(runtime_image="registry.example/runtime:1")
VARIANT = {
    "apiVersion": "sixfold.dev/v1alpha1",
    "kind": "ModelVariant",
    "metadata": {"name": "small", "namespace": "ns", "uid": "v1"},
}
TEXT = {"uri": "pvc://models/text.jsonl", "samples": 64}
CALIBRATING = {"uri": "pvc://models/calibration.jsonl"}
PLAIN = {"source": {"uri": "pvc://models/chat"}}
HUB = {"source": {"uri": f"hf://acme/chat@{'0' * 40}"}, "artifact": {"claimName": "models"}}
GPTQ = {
    "source": {"variantRef": {"name": "chat"}},
    "precision": {"scheme": "GPTQ", "modules": [{"match": "o_proj", "full": True}]},
    "calibration": CALIBRATING,
    "evaluation": TEXT,
    "artifact": {"claimName": "models"},
}
EVERYTHING = GPTQ | {"lora": {"uri": "pvc://models/tone"}, "draftFor": {"name": "large"}}
INT8 = HUB | {"task": "Classification", "precision": {"scheme": "INT8"}, "evaluation": TEXT}
SLICED = PLAIN | {"task": "TokenClassification", "slices": [{"name": "ner"}]}
EXITS = INT8 | {
    "precision": {},
    "exitHeads": {"training": {"uri": "pvc://models/training.jsonl"}, "depths": [2, 4], "distillation": "0.5"},
    "calibration": CALIBRATING,
    "slices": [
        {"name": "topic", "checkpoint": "pvc://models/topic"},
        {"name": "ner", "task": "TokenClassification", "training": TEXT, "adapter": {"width": 16}},
    ],
}


@pytest.mark.parametrize(
    "fields",
    [PLAIN, HUB, GPTQ, EVERYTHING, INT8, SLICED, EXITS],
    ids=["plain", "hub", "gptq", "all", "int8", "sliced", "exits"],
)
def test_the_arguments_are_understood(fields: dict[str, Any]) -> None:
    spec = ModelVariantSpec.model_validate({"task": "Generation", **fields})
    inputs = Inputs(spec.source.uri or "pvc://models/chat", "pvc://models/large" if spec.draft_for else "")
    job = preparation_job(VARIANT, spec, inputs, SETTINGS)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["sixfold"]
    verb, *arguments = container["args"]
    assert verb == "prepare"
    single = typer.Typer()
    single.command()(prepare)
    understood = get_command(single).make_context(verb, list(arguments)).params
    assert understood["source"] == inputs.source
    assert understood["task"] == spec.task
    heads, slices = understood["exit_heads"], understood["slices"]
    assert (None if heads is None else ExitHeads.model_validate_json(heads)) == spec.exit_heads
    assert ([] if slices is None else TypeAdapter(list[SliceSpec]).validate_json(slices)) == spec.slices
