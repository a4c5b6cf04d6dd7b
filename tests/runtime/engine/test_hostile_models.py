"""Model folders made to do harm: no code of theirs runs, no file outside of them is read, each is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.loader import load
from sixfold_runtime.engine.protocol import TokenizerBundle
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.tokenizer import ModelTokenizer

CPU = torch.device("cpu")
CopyOf = Callable[[Path], Path]


class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def refuses(folder: Path, words: str, task: Task = Task.GENERATION) -> None:
    with pytest.raises(ModelLoadError, match=words) as refused:
        load(ServedModel(name="m", task=task, path=str(folder)), CPU)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_never_loaded(decoder_folder: Path, copy_of: CopyOf, tmp_path: Path, name: str) -> None:
    folder, mark = copy_of(decoder_folder), tmp_path / "mark"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    refuses(folder, f"{name}: pickled weights are never loaded")
    (folder / "model.safetensors").write_bytes((folder / name).read_bytes())
    refuses(folder, "is damaged")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(folder, f"lists '{name}', which is no safetensors file")
    assert not mark.exists()


def safetensors_file(header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS = {
    "a header of 2**63 bytes": safetensors_file(b"{}", length=2**63),
    "a header of 2**64 - 1 bytes": safetensors_file(b"{}", length=2**64 - 1),
    "a header longer than the file": safetensors_file(b"{}", length=10_000),
    "a header of nothing": safetensors_file(b""),
    "a header that is a list": safetensors_file([]),
    "a deep header": safetensors_file(b"[" * 100_000),
    "overlapping tensors": safetensors_file({"a": tensor(0, 40, 10), "b": tensor(20, 64, 11)}),
    "the same bytes twice": safetensors_file({"a": tensor(0, 64, 16), "b": tensor(0, 64, 16)}),
    "a hole": safetensors_file({"a": tensor(0, 16, 4), "b": tensor(32, 64, 8)}),
    "past the end": safetensors_file({"a": tensor(0, 4000, 1000)}),
    "the end before the beginning": safetensors_file({"a": tensor(64, 0, 16)}),
    "a negative offset": safetensors_file({"a": tensor(-16, 48, 16)}),
    "a shape that overflows": safetensors_file({"a": tensor(0, 64, 2**62, 2**62, 4)}),
    "a negative shape": safetensors_file({"a": tensor(0, 64, -16)}),
    "an unknown type": safetensors_file({"a": tensor(0, 64, 16, dtype="OBJ")}),
    "more bytes than tensors": safetensors_file({"a": tensor(0, 16, 4)}),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_lie(decoder_folder: Path, copy_of: CopyOf, content: bytes) -> None:
    folder = copy_of(decoder_folder)
    (folder / "model.safetensors").write_bytes(content)
    refuses(folder, "is damaged")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_can_not_lead_out_of_the_folder(decoder_folder: Path, copy_of: CopyOf, name: str) -> None:
    folder = copy_of(decoder_folder)
    shutil.copytree(decoder_folder, folder.parent / "other", dirs_exist_ok=True)
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="which is no safetensors file beside it"):
        TensorStore(folder)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "{"])
def test_an_index_that_is_none(decoder_folder: Path, copy_of: CopyOf, index: str) -> None:
    folder = copy_of(decoder_folder)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError):
        TensorStore(folder)


AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModel": "evil.EvilModel",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoModelForSequenceClassification": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTokenizer", None],
}


@pytest.mark.parametrize("model_type", [None, "evil", "bert"])
@pytest.mark.parametrize("task", [Task.GENERATION, Task.CLASSIFICATION])
def test_code_beside_the_weights_never_runs(
    decoder_folder: Path,
    classifier_folder: Path,
    copy_of: CopyOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: Task,
    model_type: str | None,
) -> None:
    monkeypatch.setenv("HF_HUB_TRUST_REMOTE_CODE", "1")
    folder, mark = copy_of(decoder_folder if task is Task.GENERATION else classifier_folder), tmp_path / "mark"
    for name in ("evil.py", "modeling_evil.py", "tokenization_evil.py", "sitecustomize.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')\nclass EvilConfig: pass\nEvilModel = EvilConfig\n")
    for file in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        content |= {"auto_map": AUTO_MAP} | ({"model_type": model_type} if model_type and file == "config.json" else {})
        (folder / file).write_text(json.dumps(content))
    try:
        load(ServedModel(name="m", task=task, path=str(folder)), CPU)
    except ModelLoadError as error:
        assert str(folder) in str(error)
    assert not mark.exists()


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{% for x in range(10**9) %}{% for y in range(10**9) %}x{% endfor %}{% endfor %}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_stays_in_its_sandbox(template: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tokenizer = (Path(__file__).parents[3] / "examples" / "models" / "chat" / "tokenizer.json").read_text()
    bundle = TokenizerBundle(tokenizer, template.replace("MARK", str(mark)))
    loaded = ModelTokenizer.from_json(msgspec.json.encode(bundle))
    with pytest.raises(ApiError) as refused:
        loaded.render([{"role": "user", "content": "x"}])
    assert refused.value.status == 400
    assert not mark.exists()


def test_a_good_folder_is_still_loaded(decoder_folder: Path, copy_of: CopyOf) -> None:
    folder = copy_of(decoder_folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "part.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), CPU).vocabulary_tokens == 320
