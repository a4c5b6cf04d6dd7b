"""Loading model folders: good ones, and each way in which one can be wrong."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.loader import LoadedModel, load, task_of
from sixfold_runtime.engine.protocol import TokenizerBundle

CPU = torch.device("cpu")
CopyOf = Callable[[Path], Path]


def served(folder: Path, task: Task = Task.GENERATION) -> ServedModel:
    return ServedModel(name="m", task=task, path=str(folder))


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_a_decoder_and_what_its_folder_says(decoder: LoadedModel) -> None:
    assert decoder.context_tokens == 256
    assert decoder.vocabulary_tokens == 320
    assert decoder.eos_ids == {1}
    assert decoder.stop_strings == ("\n\n",)
    assert decoder.dtype == torch.float32
    assert decoder.weight_bytes > 100_000
    assert (decoder.decoder is None, decoder.module) == (False, None), "read straight from the files"


def test_a_classifier_has_its_labels(classifier: LoadedModel) -> None:
    assert classifier.labels == ("bad", "so-so", "good")
    assert classifier.context_tokens == 64


def test_the_tokenizer_bundle_is_complete_and_named_by_its_digest(decoder: LoadedModel) -> None:
    bundle = msgspec.json.decode(decoder.tokenizer.bundle, type=TokenizerBundle)
    assert hashlib.sha256(decoder.tokenizer.bundle).hexdigest() == decoder.tokenizer.sha256
    assert bundle.chat_template == "{{ messages[0].content }}"
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert bundle.vocabulary_tokens == 320
    text = "你好 😀 to be"
    assert Tokenizer.from_str(bundle.tokenizer_json).encode(text).ids == decoder.tokenizer.tokenizer.encode(text).ids


def test_a_template_file_wins(decoder_folder: Path, copy_of: CopyOf) -> None:
    folder = copy_of(decoder_folder)
    (folder / "chat_template.jinja").write_text("from the file")
    model = load(served(folder), CPU)
    assert msgspec.json.decode(model.tokenizer.bundle, type=TokenizerBundle).chat_template == "from the file"


def test_of_several_templates_the_default_is_taken(decoder_folder: Path, copy_of: CopyOf) -> None:
    folder = copy_of(decoder_folder)
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    model = load(served(folder), CPU)
    assert msgspec.json.decode(model.tokenizer.bundle, type=TokenizerBundle).chat_template == "yes"


def test_end_tokens_come_from_config_where_generation_config_is_missing(decoder_folder: Path, copy_of: CopyOf) -> None:
    folder = copy_of(decoder_folder)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=[1, 0])
    model = load(served(folder), CPU)
    assert (model.eos_ids, model.stop_strings) == ({0, 1}, ())


def test_half_precision_weights_are_computed_exactly_and_rotary_frequencies_are_not_rounded(
    decoder: LoadedModel, new_decoder: Callable[..., Path], tmp_path: Path
) -> None:
    import transformers

    module = transformers.AutoModelForCausalLM.from_pretrained(decoder.served.path, dtype=torch.bfloat16)
    module.save_pretrained(tmp_path / "half")
    folder = new_decoder(tmp_path / "folder")
    (tmp_path / "half" / "model.safetensors").replace(folder / "model.safetensors")
    model = load(served(folder), CPU)
    assert (model.dtype, model.weight_bytes) == (torch.float32, decoder.weight_bytes)
    assert model.decoder is not None and decoder.decoder is not None
    assert model.decoder.embeddings.equal(decoder.decoder.embeddings.bfloat16().float())
    forward = make_forward(model)
    logits = forward([list(range(2, 102))], forward.new_cache(1))[0]
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = exact(torch.arange(2, 102)[None]).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_nothing_is_fetched(decoder_folder: Path, copy_of: CopyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the loader opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    folder = copy_of(decoder_folder)
    load(served(folder), CPU)
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").unlink()
    load(served(folder), CPU)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
    "no model type": (lambda folder: edit(folder / "config.json", model_type=None), "has no model_type"),
    "unknown model type": (lambda folder: edit(folder / "config.json", model_type="nope"), "can't load it"),
    "encoder": (
        lambda folder: edit(folder / "config.json", architectures=["BertForMaskedLM"]),
        "needs a model such as LlamaForCausalLM.*architectures: BertForMaskedLM",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "only a pickle": (pickle_only, "pytorch_model.bin: pickled weights are never loaded"),
    "truncated": (truncate, "model.safetensors is damaged"),
    "garbage": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "is damaged"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is damaged"),
    "a missing tensor": (drop_tensor, "don't fill the model.*1 missing keys.*up_proj"),
    "a missing shard": (lose_a_shard, "model-00001-of-00002.safetensors is missing"),
    "other shapes": (lambda folder: edit(folder / "config.json", intermediate_size=48), "load it|don't fill"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "can't be read as a tokenizer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_says_what_is_wrong(damage: str, decoder_folder: Path, copy_of: CopyOf) -> None:
    folder = copy_of(decoder_folder)
    break_it, message = DAMAGES[damage]
    break_it(folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(served(folder), CPU)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is no folder"):
        load(served(tmp_path / "absent"), CPU)


def test_a_tokenizer_larger_than_the_model(tmp_path: Path, new_decoder: Callable[..., Path]) -> None:
    folder = new_decoder(tmp_path, vocab_size=300)
    with pytest.raises(ModelLoadError, match=r"ids up to 319, but the model only 300 embeddings"):
        load(served(folder), CPU)


def test_a_tokenizer_smaller_than_the_model_is_fine(tmp_path: Path, new_decoder: Callable[..., Path]) -> None:
    assert load(served(new_decoder(tmp_path, vocab_size=512)), CPU).vocabulary_tokens == 512


def test_a_decoder_is_no_classifier_and_the_other_way_round(decoder_folder: Path, classifier_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"ForSequenceClassification, but .* LlamaForCausalLM"):
        load(served(decoder_folder, Task.CLASSIFICATION), CPU)
    with pytest.raises(ModelLoadError, match=r"ForCausalLM, but .* BertForSequenceClassification"):
        load(served(classifier_folder), CPU)


def test_a_trunk_without_a_head_is_no_classifier(classifier_folder: Path, copy_of: CopyOf) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_of(classifier_folder)
    tensors = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "classifier" not in name
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"don't fill the model.*classifier"):
        load(served(folder, Task.CLASSIFICATION), CPU)


def test_a_single_label_is_no_classifier(classifier_folder: Path, copy_of: CopyOf) -> None:
    import transformers

    folder = copy_of(classifier_folder)
    config = transformers.BertConfig.from_pretrained(folder, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    with pytest.raises(ModelLoadError, match="at least two labels"):
        load(served(folder, Task.CLASSIFICATION), CPU)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", Task.GENERATION),
        ("GPT2LMHeadModel", Task.GENERATION),
        ("BertForSequenceClassification", Task.CLASSIFICATION),
        ("RobertaForTokenClassification", Task.TOKEN_CLASSIFICATION),
        ("BertModel", Task.CLASSIFICATION),
        ("LlamaModel", None),
        ("ViTForImageClassification", None),
    ],
)
def test_what_an_architecture_is_for(architecture: str, task: Task | None) -> None:
    assert task_of({"architectures": [architecture]}) is task
