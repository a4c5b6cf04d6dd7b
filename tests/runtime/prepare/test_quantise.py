"""Quantised variants from the example draft, a real model of one layer: made, measured, refused, served.

GPTQModel takes twenty seconds to import, in a process of its own: two of them run here, both for one preparation.
"""

import json
import random
import shutil
import string
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sixfold_api.precision import Scheme
from sixfold_api.scalars import Task
from sixfold_runtime.prepare.evaluate import CausalScorer, load_weights
from sixfold_runtime.prepare.saturation import dequantised

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
CALIBRATION = {"uri": "pvc://models/text/calibration.jsonl"}
EVALUATION = {"uri": "pvc://models/text/heldout.jsonl", "samples": 8}
GPTQ = {"scheme": "GPTQ", "groupSize": 32}
INT8 = {"scheme": "INT8"}


def copy_examples(claims):
    for name in ("chat-draft", "text"):
        shutil.copytree(EXAMPLES / name, claims / "models" / name)
    (claims / "artifacts").mkdir()


@pytest.fixture
def examples(claims):
    """The claim `models` with the draft and the texts, and the empty claim `artifacts`."""
    copy_examples(claims)
    return claims / "models"


def options(precision=None, calibration=None, evaluation=EVALUATION, path="new", **others):
    given = {"precision": precision, "calibration": calibration, "evaluation": evaluation}
    return [
        *("--artifact-claim", "artifacts", "--artifact-path", path),
        *(part for name, value in given.items() if value for part in (f"--{name}", json.dumps(value))),
        *(part for name, value in others.items() for part in (f"--{name.replace('_', '-')}", str(value))),
    ]


def write_text(examples, name, texts):
    (examples / "text" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"uri": f"pvc://models/text/{name}"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One preparation with a budget that 4 bits miss: (claims, exit code, log, summary)."""
    from sixfold_runtime.cli import app

    claims = tmp_path_factory.mktemp("made") / "claims"
    (claims / "models").mkdir(parents=True)
    copy_examples(claims)
    # What a run left that died in the middle.
    (claims / "artifacts" / ".new.asked.partial").mkdir()
    (claims / "artifacts" / ".new.asked.partial" / "model.safetensors").write_bytes(b"half")
    summary = claims.parent / "summary"
    calibration = CALIBRATION | {"samples": 48}
    modules = [{"match": "o_proj", "full": True}, {"match": "v_proj", "bits": 8}]
    arguments = ["--source", "pvc://models/chat-draft", "--task", "Generation", "--claims", str(claims)]
    arguments += options(GPTQ | {"modules": modules}, calibration, budget=0.2)
    result = CliRunner().invoke(app, ["prepare", *arguments, "--summary", str(summary)])
    assert result.exit_code == 0, result.output
    return claims, result.output, json.loads(summary.read_text())


def test_over_the_budget_the_worst_layers_get_more_bits(made):
    claims, log, summary = made
    folder = claims / "artifacts" / "new"
    report = json.loads((folder / "prepare-report.json").read_text())
    losses = [tried["loss"] for tried in report["tries"]]
    assert losses[0] > 0.2 >= losses[-1]
    assert report["tries"][0]["layers"] == "5 linears at 4 bits, 1 linears at 8 bits, 1 linears in full precision"
    assert report["tries"][1]["try"] == "more for the worst quarter"
    quality = summary["quality"]
    assert (quality["metric"], quality["tries"], quality["budget"]) == ("perplexity", len(losses), "0.2")
    assert float(quality["loss"]) <= 0.2
    assert 0 < float(quality["kl"]) < 0.02
    assert 30 < float(quality["source"]) < 40
    rows = {row["name"].removeprefix("model.layers.0."): row for row in report["layers"]}
    assert rows["self_attn.o_proj"] == {"name": "model.layers.0.self_attn.o_proj", "full": True}
    assert rows["self_attn.v_proj"]["bits"] == 8
    assert all(0 <= rows["mlp.down_proj"][share] < 1 for share in ("lostToInt8", "beyondCalibration"))
    assert rows["mlp.down_proj"]["loss"] > 0
    assert report["bytesAfter"] < report["bytesBefore"]
    assert report["kernels"]["problem"] == ""
    assert report["calibration"]["samples"] == 48
    assert "worst quarter" in log


def test_the_artifact_is_whole_and_alone(made):
    claims, _, summary = made
    assert sorted(path.name for path in (claims / "artifacts").iterdir()) == ["new"]
    names = {path.name for path in (claims / "artifacts" / "new").iterdir()}
    source = {path.name for path in (claims / "models" / "chat-draft").iterdir()}
    assert names == source - {"README.md"} | {"prepare-report.json"}
    facts = summary["facts"]
    assert (facts["scheme"], facts["architecture"], facts["contextTokens"]) == ("GPTQ", "LlamaForCausalLM", 4096)
    assert facts["parameters"] == 327_936 or facts["parameters"] > 300_000


def test_gptqmodel_would_read_the_same_precisions(made):
    claims, _, _ = made
    quantization = json.loads((claims / "artifacts" / "new" / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "gptq"
    assert quantization["desc_act"] is True
    assert quantization["sym"] is False
    assert quantization["dynamic"]["-:^model\\.layers\\.0\\.self_attn\\.o_proj$"] == {}


def test_the_engine_computes_what_the_integers_say(made):
    claims, _, _ = made
    folder, source = claims / "artifacts" / "new", claims / "models" / "chat-draft"
    model = load_weights(source, Task.GENERATION)
    ids = [1, *range(40, 90)]
    prepared = CausalScorer(load_weights(folder, Task.GENERATION)).logits(ids)
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, weight in dequantised(folder):
        reference.get_submodule(name).weight.data = weight
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    difference = (expected.exp() * (expected - prepared.log_softmax(-1))).sum(-1).mean()
    assert difference < 1e-3
    assert model.decoder is not None


def test_a_quantised_folder_is_verified_in_place(made, run_prepare, claims):
    """As an AutoGPTQ checkpoint of someone else's would be."""
    shutil.copytree(made[0] / "artifacts" / "new", claims / "models" / "gptq")
    assert run_prepare("pvc://models/gptq").facts.scheme is Scheme.GPTQ
    path = claims / "models" / "gptq" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".qzeros"))
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path)
    failure = run_prepare("pvc://models/gptq").failure
    assert failure.reason == "CorruptWeights"
    assert "qzeros" in failure.message


@pytest.mark.parametrize(
    ("change", "message"),
    [(None, "quantize_config.json"), ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'")],
)
def test_quantised_folders_that_are_not_read(made, run_prepare, claims, change, message):
    folder = Path(shutil.copytree(made[0] / "artifacts" / "new", claims / "models" / "gptq"))
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (folder / "config.json").write_text(
        json.dumps(config if change is None else config | {"quantization_config": quantization | change})
    )
    failure = run_prepare("pvc://models/gptq").failure
    assert failure.reason == "UnsupportedFormat"
    assert message in failure.message


def test_quantised_weights_are_not_quantised_again(made, run_prepare, claims):
    copy_examples(claims)
    shutil.copytree(made[0] / "artifacts" / "new", claims / "models" / "gptq")
    failure = run_prepare("pvc://models/gptq", "Generation", *options(INT8)).failure
    assert failure.reason == "UnsupportedPrecision"


def test_int8_needs_no_calibration(examples, run_prepare):
    run = run_prepare("pvc://models/chat-draft", "Generation", *options(INT8))
    assert run.facts.scheme is Scheme.INT8
    quality = run.summary.quality
    assert abs(float(quality.loss)) < 0.2
    assert quality.tries == 1
    assert run.facts.size_bytes < 0.75 * (examples / "chat-draft" / "model.safetensors").stat().st_size


def test_int8_of_a_decoder_that_transformers_computes(examples, claims, run_prepare):
    """The example draft under another name: the engine has no decoder of its own for it."""
    folder = examples / "chat-draft"
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    run = run_prepare("pvc://models/chat-draft", "Generation", *options(INT8))
    assert run.facts.scheme is Scheme.INT8
    assert load_weights(claims / "artifacts" / "new", Task.GENERATION).decoder is None
    assert abs(float(run.summary.quality.loss)) < 0.2


def test_what_holds_no_budget_is_not_served(examples, claims, run_prepare):
    run = run_prepare("pvc://models/chat-draft", "Generation", *options(INT8, budget=-5))
    assert run.failure.reason == "OverBudget"
    assert run.summary.facts is None
    assert run.summary.quality.tries == 3
    folder = claims / "artifacts" / "new"
    assert [path.name for path in folder.iterdir()] == ["prepare-report.json"]
    report = json.loads((folder / "prepare-report.json").read_text())
    assert [tried["try"] for tried in report["tries"]][1:] == ["more for the worst quarter", "more for the worst half"]
    assert report["failure"]["reason"] == "OverBudget"


def test_a_classifier_in_int8(examples, claims, classifier, run_prepare):
    shutil.copytree(classifier, claims / "models" / "intent")
    rows = [{"text": f"w{3 + at % 50} w{4 + at % 40}", "label": ["billing", "other"][at % 2]} for at in range(16)]
    (examples / "text" / "labelled.jsonl").write_text("\n".join(map(json.dumps, rows)))
    evaluation = {"uri": "pvc://models/text/labelled.jsonl", "samples": 16}
    run = run_prepare("pvc://models/intent", "Classification", *options(INT8, evaluation=evaluation, budget=20))
    assert run.facts.scheme is Scheme.INT8
    assert run.facts.labels == ["billing", "technical", "other"]
    assert run.summary.quality.metric == "accuracy"
    model = load_weights(claims / "artifacts" / "new", Task.CLASSIFICATION)
    assert model.weight_bytes < load_weights(claims / "models" / "intent", Task.CLASSIFICATION).weight_bytes


def test_gptq_for_a_classifier_says_what_to_do(examples, claims, classifier, run_prepare):
    shutil.copytree(classifier, claims / "models" / "intent")
    failure = run_prepare("pvc://models/intent", "Classification", *options(GPTQ, CALIBRATION)).failure
    assert failure.reason == "UnsupportedPrecision"
    assert "INT8" in failure.message


def test_groups_that_do_not_divide_fail_at_once(examples, run_prepare):
    failure = run_prepare(
        "pvc://models/chat-draft", "Generation", *options(GPTQ | {"groupSize": 256}, CALIBRATION)
    ).failure
    assert failure.reason == "UnsupportedPrecision"
    assert "256" in failure.message


def random_characters():
    generator = random.Random(0)
    return ["".join(generator.choice(string.printable[:95]) for _ in range(300)) for _ in range(128)]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (random_characters(), "look random to the model"),
        (
            ["to be or not to be, that is the question: whether 'tis nobler in the mind to suffer"] * 128,
            "repeat others",
        ),
        ([f"{number} {'ha ' * 100}" for number in range(128)], "one thing over and over"),
        (["Now is the winter of our discontent made glorious summer by this sun of York"], "holds 1 samples"),
    ],
)
def test_unusable_calibration_text_is_refused(examples, run_prepare, texts, message):
    calibration = write_text(examples, "odd.jsonl", texts)
    failure = run_prepare("pvc://models/chat-draft", "Generation", *options(GPTQ, calibration)).failure
    assert failure.reason == "UnusableCalibration"
    assert message in failure.message


def test_evaluation_on_the_calibration_text_is_refused(examples, run_prepare):
    evaluation = CALIBRATION | {"samples": 8}
    failure = run_prepare(
        "pvc://models/chat-draft", "Generation", *options(GPTQ, CALIBRATION, evaluation=evaluation)
    ).failure
    assert failure.reason == "UnusableEvaluation"


def test_a_full_disk_is_worth_another_try(examples, claims, run_prepare, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    failure = run_prepare("pvc://models/chat-draft", "Generation", *options(INT8)).transient_failure
    assert failure.reason == "DiskFull"
    assert not list((claims / "artifacts").glob(".new.*")), "nothing half-written keeps the disk full"
