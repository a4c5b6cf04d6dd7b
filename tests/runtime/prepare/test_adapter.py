"""LoRA adapters: merged into full weights, refused on quantised ones, retrained for them. PEFT writes the adapters."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sixfold_api.precision import Scheme
from sixfold_api.scalars import Task
from sixfold_runtime.cli import app
from sixfold_runtime.prepare.adapter import import_peft
from sixfold_runtime.prepare.evaluate import CausalScorer, load_weights

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
IDS = [1, *range(40, 90)]
ARTIFACT = ["--artifact-claim", "artifacts", "--artifact-path", "new"]


def full_model(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A claim with the example draft, an adapter that changes it much, and the draft in INT8."""
    peft = import_peft()
    claims = tmp_path_factory.mktemp("adapters") / "claims"
    for name in ("chat-draft", "text"):
        shutil.copytree(EXAMPLES / name, claims / "models" / name)
    (claims / "artifacts").mkdir()
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    adapted = peft.get_peft_model(full_model(EXAMPLES / "chat-draft"), peft.LoraConfig(r=4, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(claims / "models" / "adapter")
    evaluation = json.dumps({"uri": "pvc://models/text/heldout.jsonl", "samples": 8})
    arguments = ["--source", "pvc://models/chat-draft", "--task", "Generation", "--claims", str(claims)]
    arguments += ["--artifact-claim", "artifacts", "--artifact-path", "int8", "--evaluation", evaluation]
    run = CliRunner().invoke(app, ["prepare", *arguments, "--precision", '{"scheme": "INT8"}'])
    assert run.exit_code == 0, run.output
    return claims


@pytest.fixture
def claims(shared):
    shutil.rmtree(shared / "artifacts" / "new", ignore_errors=True)
    return shared


def prepared_logits(folder):
    return CausalScorer(load_weights(folder, Task.GENERATION)).logits(IDS)


def test_an_adapter_is_merged_into_full_weights(claims, run_prepare):
    peft = import_peft()
    run = run_prepare("pvc://models/chat-draft", "Generation", "--lora", "pvc://models/adapter", *ARTIFACT)
    assert run.facts.scheme is Scheme.NONE
    expected = peft.PeftModel.from_pretrained(
        full_model(claims / "models" / "chat-draft"), claims / "models" / "adapter"
    )
    with torch.inference_mode():
        reference = expected(torch.tensor([IDS])).logits[0]
    plain = prepared_logits(claims / "models" / "chat-draft")
    merged = prepared_logits(claims / "artifacts" / "new")
    # The merged weights are rounded to the checkpoint's bf16.
    assert (merged - reference).abs().max() < 0.2 < (plain - reference).abs().max()


def test_an_adapter_of_full_precision_is_refused_on_quantised_weights(claims, run_prepare):
    failure = run_prepare("pvc://artifacts/int8", "Generation", "--lora", "pvc://models/adapter", *ARTIFACT).failure
    assert failure.reason == "AdapterNotRetrained"
    assert "sixfold prepare lora --base" in failure.message


def test_a_folder_without_an_adapter(claims, run_prepare):
    failure = run_prepare("pvc://models/chat-draft", "Generation", "--lora", "pvc://models/text", *ARTIFACT).failure
    assert failure.reason == "UnusableAdapter"
    assert "adapter_config.json is missing" in failure.message


def retrain(claims, out, *arguments):
    paths = {"base": "artifacts/int8", "adapter": "models/adapter", "text": "models/text/calibration.jsonl"}
    given = [part for name, path in paths.items() for part in (f"--{name}", str(claims / path))]
    return CliRunner().invoke(app, ["prepare", "lora", *given, "--out", str(out), *arguments])


def test_a_retrained_adapter_is_served_beside_its_base(claims, run_prepare):
    out = claims / "models" / "retrained"
    run = retrain(claims, out, "--steps", "20", "--learning-rate", "0.005")
    assert run.exit_code == 0, run.output
    before, after = (float(word) for word in run.output.split("held-out loss ")[-1].split("\n")[0].split(" -> "))
    assert after < before
    prepared = run_prepare("pvc://artifacts/int8", "Generation", "--lora", "pvc://models/retrained", *ARTIFACT)
    assert prepared.facts.scheme is Scheme.INT8
    assert prepared.facts.digest != run_prepare("pvc://artifacts/int8").facts.digest
    base, adapted = prepared_logits(claims / "artifacts" / "int8"), prepared_logits(claims / "artifacts" / "new")
    assert (base - adapted).abs().max() > 0.2
    # A mark of other weights is no mark.
    mark = out / "sixfold_lora.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"base_digest": "sha256:" + "0" * 64}))
    failure = run_prepare("pvc://artifacts/int8", "Generation", "--lora", "pvc://models/retrained", *ARTIFACT).failure
    assert failure.reason == "AdapterNotRetrained"
    assert "trained for other weights" in failure.message


def test_an_adapter_that_gets_no_better_is_not_written(claims, tmp_path):
    run = retrain(claims, tmp_path / "out", "--steps", "1", "--learning-rate", "0")
    assert run.exit_code == 2
    assert "UnusableAdapter: the adapter got no better" in run.output
    assert not (tmp_path / "out").exists()
