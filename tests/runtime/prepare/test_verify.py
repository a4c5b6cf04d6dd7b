"""`prepare` on weights in a claim: what it finds out about good ones, and how it names what is wrong with bad ones."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file


def respoil(folder, change):
    """Rewrite the weights of a model after `change` of its state dict."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    removed = {key for key, value in changes.items() if value is None}
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in removed}))


def test_a_causal_model_is_described(model, run_prepare):
    run = run_prepare("pvc://models/chat")
    facts = run.facts
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.dtype == "bfloat16"
    assert facts.context_tokens == 128
    assert facts.parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert facts.size_bytes == (model / "model.safetensors").stat().st_size
    assert facts.vocabulary_tokens == 60
    assert facts.labels == []
    report = json.loads((model / "prepare-report.json").read_text())
    assert report["facts"]["digest"] == facts.digest
    assert set(report["files"]) >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_classifier_is_described(claims, classifier, run_prepare):
    shutil.copytree(classifier, claims / "models" / "intent")
    facts = run_prepare("pvc://models/intent", "Classification").facts
    assert facts.architecture == "BertForSequenceClassification"
    assert facts.labels == ["billing", "technical", "other"]
    assert facts.context_tokens == 40
    assert facts.dtype == "float32"


def test_a_second_run_finds_the_same(model, run_prepare):
    assert run_prepare("pvc://models/chat").facts == run_prepare("pvc://models/chat").facts


def test_the_digest_follows_the_files_of_the_model_only(model, run_prepare):
    before = run_prepare("pvc://models/chat").facts
    (model / "README.md").write_text("hello")
    assert run_prepare("pvc://models/chat").facts.digest == before.digest
    respoil(model, lambda state: state["model.norm.weight"].mul_(2))
    after = run_prepare("pvc://models/chat").facts
    assert after.digest != before.digest
    assert after.tokenizer_fingerprint == before.tokenizer_fingerprint


def test_padding_is_no_part_of_the_tokenizers_fingerprint(model, run_prepare):
    before = run_prepare("pvc://models/chat").facts
    edit_json(
        model / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
    )
    after = run_prepare("pvc://models/chat").facts
    assert after.tokenizer_fingerprint == before.tokenizer_fingerprint
    assert after.digest != before.digest


def test_sharded_weights(claims, chat_model, run_prepare):
    folder = claims / "models" / "sharded"
    shutil.copytree(chat_model, folder)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    transformers.AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="8KB"
    )
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    facts = run_prepare("pvc://models/sharded").facts
    assert facts.parameters == sum(tensor.numel() for tensor in whole.values())
    assert facts.size_bytes == sum(shard.stat().st_size for shard in shards)

    shards[0].rename(folder / "elsewhere")
    failure = run_prepare("pvc://models/sharded").failure
    assert failure.reason == "MissingWeights"
    assert shards[0].name in failure.message
    (folder / "elsewhere").rename(shards[0])

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.ghost.weight"] = shards[0].name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    failure = run_prepare("pvc://models/sharded").failure
    assert failure.reason == "MissingWeights"
    assert "model.ghost.weight is missing in the file" in failure.message

    (folder / "model.safetensors.index.json").unlink()
    failure = run_prepare("pvc://models/sharded").failure
    assert failure.reason == "MissingWeights"
    assert "model.safetensors.index.json is missing" in failure.message


def test_merged_experts_are_no_missing_weights(claims, run_prepare, chat_model):
    """Mixtral stores experts one by one and runs them merged: only transformers' own loader knows."""
    folder = claims / "models" / "experts"
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=64,
    )
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(folder)
    shutil.copy(chat_model / "tokenizer.json", folder)
    facts = run_prepare("pvc://models/experts").facts
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_position_tables_behind_a_padding_index_are_shorter(claims, run_prepare, chat_model):
    folder = claims / "models" / "roberta"
    config = transformers.RobertaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=34,
        pad_token_id=1,
        num_labels=2,
    )
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    shutil.copy(chat_model / "tokenizer.json", folder)
    assert run_prepare("pvc://models/roberta", "Classification").facts.context_tokens == 32


def test_unused_tensors_are_said(model, run_prepare):
    respoil(model, lambda state: state.update(surplus=torch.zeros(2)))
    run = run_prepare("pvc://models/chat")
    assert run.exit_code == 0
    assert "does not use 1 tensors" in run.log
    assert json.loads((model / "prepare-report.json").read_text())["unusedTensors"] == ["surplus"]


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lengthen(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")


def only_pickle(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")


def other_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"x{index}": index for index in range(60, 90)}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def smaller_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {"<unk>": 0, "a": 1}
    (folder / "tokenizer.json").write_text(json.dumps(content))


SPOILED = {
    "cut off": (truncate, "CorruptWeights", "it is cut off"),
    "too long": (lengthen, "CorruptWeights", "4 bytes at its end belong to no tensor"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "CorruptWeights", "0 bytes and no header"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"garbage!" * 99), "CorruptWeights", "no header"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "MissingWeights", "neither model.safetensors nor"),
    "pickle only": (only_pickle, "UnsafeFormat", "pytorch_model.bin only"),
    "missing tensor": (
        lambda f: respoil(f, lambda s: s.pop("model.norm.weight")),
        "MissingWeights",
        "needs model.norm.weight, which no file holds (1 tensors are missing)",
    ),
    "wrong shape": (
        lambda f: respoil(f, lambda s: s.update({"model.norm.weight": torch.ones(31)})),
        "WrongArchitecture",
        "model.norm.weight has shape [31], and LlamaForCausalLM with this config.json needs [32]",
    ),
    "NaN": (
        lambda f: respoil(f, lambda s: s["model.norm.weight"].fill_(float("nan"))),
        "NonFiniteWeights",
        "model.norm.weight holds NaN",
    ),
    "infinite": (
        lambda f: respoil(f, lambda s: s["model.embed_tokens.weight"][3, 5:6].fill_(float("inf"))),
        "NonFiniteWeights",
        "model.embed_tokens.weight holds NaN or infinite",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "InvalidConfig", "config.json is missing"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "InvalidConfig", "config.json is no JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "InvalidConfig", "not list"),
    "no architecture": (lambda f: edit_json(f / "config.json", architectures=None), "InvalidConfig", "architectures"),
    "unknown model type": (lambda f: edit_json(f / "config.json", model_type="abacus"), "InvalidConfig", "abacus"),
    "impossible config": (
        lambda f: edit_json(f / "config.json", hidden_size=-1),
        "InvalidConfig",
        "config.json",
    ),
    "endless layers": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=10**9, layer_types=None),
        "MissingWeights",
        "1000000000 layers",
    ),
    "quantised": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "awq", "bits": 4}),
        "UnsupportedFormat",
        "quantised",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "TokenizerMismatch", "tokenizer.json is missing"),
    "tokenizer is garbage": (
        lambda f: (f / "tokenizer.json").write_text('{"model": 3}'),
        "TokenizerMismatch",
        "tokenizer.json is no tokenizer",
    ),
    "tokenizer of a larger model": (other_tokenizer, "TokenizerMismatch", "up to token id 89"),
    "generation ends with a token that is not there": (
        lambda f: edit_json(f / "generation_config.json", eos_token_id=[2, 61]),
        "TokenizerMismatch",
        "generation_config.json says eos_token_id 61",
    ),
    "generation config is no JSON": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "InvalidConfig",
        "generation_config.json is no JSON",
    ),
    "tokenizer config is no JSON": (
        lambda f: (f / "tokenizer_config.json").write_text("?"),
        "TokenizerMismatch",
        "tokenizer_config.json is no JSON",
    ),
    "tokenizer of a smaller model": (smaller_tokenizer, "TokenizerMismatch", "eos_token_id 2"),
}


@pytest.mark.parametrize("spoil, reason, words", SPOILED.values(), ids=SPOILED)
def test_spoiled_models_fail_with_their_reason(model, run_prepare, spoil, reason, words):
    spoil(model)
    failure = run_prepare("pvc://models/chat").failure
    assert (failure.reason, words in failure.message) == (reason, True), failure
    assert not (model / "prepare-report.json").exists()


def test_a_task_that_the_model_cannot_do(model, claims, classifier, run_prepare):
    failure = run_prepare("pvc://models/chat", "Classification").failure
    assert failure.reason == "WrongArchitecture"
    assert "LlamaForCausalLM" in failure.message
    assert "LlamaForSequenceClassification" in failure.message
    shutil.copytree(classifier, claims / "models" / "intent")
    assert run_prepare("pvc://models/intent", "Generation").failure.reason == "WrongArchitecture"


def test_labels_that_do_not_fit_the_head(claims, classifier, run_prepare):
    folder = claims / "models" / "intent"
    shutil.copytree(classifier, folder)
    edit_json(folder / "config.json", id2label={"0": "yes", "1": "no"}, label2id={"yes": 0, "no": 1})
    failure = run_prepare("pvc://models/intent", "Classification").failure
    assert failure.reason == "LabelMismatch"
    assert "config.json has 2 labels and the head" in failure.message
    assert "answers 3" in failure.message


def test_links_may_not_lead_out_of_the_claim(tmp_path, claims, chat_model, model, run_prepare):
    (claims / "models" / "link").symlink_to(chat_model)
    assert run_prepare("pvc://models/link").failure.reason == "UnsafePath"
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(chat_model / "model.safetensors")
    assert run_prepare("pvc://models/chat").failure.reason == "UnsafePath"


def test_links_inside_of_the_claim_are_fine(claims, model, run_prepare):
    (claims / "models" / "current").symlink_to("chat")
    assert run_prepare("pvc://models/current").exit_code == 0


@pytest.mark.parametrize(
    "source, words",
    [
        ("pvc://models/elsewhere", "no folder 'elsewhere'"),
        ("pvc://other/chat", "'other' is not mounted"),
        ("s3://bucket/chat", "is no source"),
        ("pvc://models/../../etc", "is no source"),
    ],
)
def test_sources_that_are_not_there(run_prepare, source, words):
    failure = run_prepare(source).failure
    assert failure.reason == "SourceNotFound"
    assert words in failure.message


CHEAP = {
    "no folder": (shutil.rmtree, "SourceNotFound"),
    "pickle only": (only_pickle, "UnsafeFormat"),
    "no config": (lambda f: (f / "config.json").unlink(), "InvalidConfig"),
    "cut off": (lambda f: os.truncate(f / "model.safetensors", 4000), "CorruptWeights"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "TokenizerMismatch"),
}


@pytest.mark.parametrize("spoil, reason", CHEAP.values(), ids=CHEAP)
def test_what_small_files_tell_needs_no_torch(model, claims, tmp_path, spoil, reason):
    """torch and transformers take seconds to import; the command runs where they can't be."""
    spoil(model)
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from sixfold_runtime.cli import app; app(prog_name='sixfold')"
    )
    options = ["--source", "pvc://models/chat", "--task", "Generation", "--claims", str(claims)]
    command = [sys.executable, "-c", script, "prepare", *options, "--summary", str(tmp_path / "summary")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, reason), done.stderr


def test_a_claim_that_cannot_be_written_to_gets_no_report(model, run_prepare):
    (model / "prepare-report.json").mkdir()  # what root can't overwrite either
    run = run_prepare("pvc://models/chat")
    assert run.exit_code == 0
    assert "no prepare-report.json: the claim is not writable" in run.log


def test_many_labels_still_fit_into_the_message(claims, chat_model, run_prepare):
    folder = claims / "models" / "many"
    labels = {index: f"label number {index} with quite a long name" for index in range(300)}
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, id2label=labels
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    shutil.copy(chat_model / "tokenizer.json", folder)
    run = run_prepare("pvc://models/many", "Classification")
    assert 0 < len(run.facts.labels) < 256
    assert 3500 < len(run.raw) <= 4096
