"""Trunks against transformers: every architecture, in any company, from any layer on, with any task slice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.task_slice import Bottleneck, LayerSlice, TaskSlice
from sixfold_runtime.engine.trunk import Rows, Trunk

torch.set_num_threads(1)
CPU = torch.device("cpu")
LAYERS, WIDTH, VOCABULARY, PAD = 3, 48, 100, 1
LABELS = ("no", "maybe", "yes")
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_act": "gelu"},
    "Bert of another kind": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "type_vocab_size": 1},
    "Roberta": {"hidden_act": "silu", "layer_norm_eps": 1e-5, "type_vocab_size": 1},
    "XLMRoberta": {"hidden_act": "relu", "type_vocab_size": 1},
    "DistilBert": {"activation": "gelu"},
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "attention_bias": True},
    "Llama with all heads of their own": {"num_key_value_heads": 4},
    "Qwen2": {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},
}
KINDS = {**ENCODERS, **DECODERS}
TASKS = {
    Task.CLASSIFICATION: "ForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "ForTokenClassification",
}
LENGTHS = [1, 17, 5, 17, 60, 2]


def build(kind: str, task: Task | None, seed: int = 3) -> Any:
    """A transformers model with large random weights."""
    import transformers

    family = kind.split()[0]
    sizes = (
        {"dim": WIDTH, "hidden_dim": 64, "n_layers": LAYERS, "n_heads": 4}
        if family == "DistilBert"
        else {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    )
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        max_position_embeddings=300,
        pad_token_id=PAD,
        initializer_range=0.1 if kind in DECODERS else 0.3,  # a decoder's residuals grow, and rounding with them
        id2label=dict(enumerate(LABELS)),
        **sizes,
        **KINDS[kind],
    )
    name = f"{family}{TASKS[task] if task else 'Model'}"
    module = getattr(transformers, name)(config).eval()
    for own in module.parameters():  # biases and norms that are 0 and 1 would hide mistakes
        if own.dim() == 1:
            own.data += 0.1 * torch.randn_like(own)
    return module


def save(module: Any, folder: Path) -> Path:
    module.save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def loaded(folder: Path, task: Task = Task.CLASSIFICATION) -> LoadedModel:
    return load(ServedModel(name="m", task=task, path=str(folder)), CPU)


def trunk_of(folder: Path, task: Task = Task.CLASSIFICATION) -> Trunk:
    trunk = loaded(folder, task).trunk
    assert trunk is not None
    return trunk


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(
        2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(100 * seed + length)
    ).tolist()


TEXTS = [text(length, seed) for seed, length in enumerate(LENGTHS)]


@torch.inference_mode()
def expected(module: Any, token_ids: list[int]) -> torch.Tensor:
    """[1, labels], of tokens [tokens, labels]"""
    return module(torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids))).logits.view(-1, len(LABELS))


def run(
    trunk: Trunk,
    texts: Sequence[list[int]],
    slices: Sequence[TaskSlice | None] | None = None,
    first: Rows | None = None,
    start: int = 0,
) -> Rows:
    rows = first or trunk.embed(texts)
    for index in range(start, trunk.layers):
        rows = trunk.layer(index, rows, slices)
    return rows


def logits(trunk: Trunk, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    head = trunk.own_head
    assert head is not None
    found = head(run(trunk, texts))
    assert found.dtype == torch.float32
    return list(found.split([len(ids) if head.task is Task.TOKEN_CLASSIFICATION else 1 for ids in texts]))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_alone_and_together(kind: str, task: Task, tmp_path: Path) -> None:
    module = build(kind, task)
    trunk = trunk_of(save(module, tmp_path), task)
    assert (trunk.layers, trunk.width, trunk.kernel, trunk.vocabulary) == (LAYERS, WIDTH, "dense", VOCABULARY)
    assert trunk.own_head is not None and (trunk.own_head.task, trunk.own_head.labels) == (task, LABELS)
    together = logits(trunk, TEXTS)
    for token_ids, found in zip(TEXTS, together, strict=True):
        close(found, expected(module, token_ids))
        close(logits(trunk, [token_ids])[0], found)


@pytest.mark.parametrize("kind", ["Bert", "Llama", "Qwen2"])
def test_long_texts_beside_short_ones(kind: str, tmp_path: Path) -> None:
    module = build(kind, Task.CLASSIFICATION)
    trunk = trunk_of(save(module, tmp_path))
    texts = [text(290), text(3), text(225), text(224)]
    for token_ids, found in zip(texts, logits(trunk, texts), strict=True):
        close(found, expected(module, token_ids))


@pytest.mark.parametrize("kind", ["Roberta", "Llama"])
def test_the_token_of_padding_within_a_text(kind: str, tmp_path: Path) -> None:
    """RoBERTa counts no positions for it, and a decoder's last token is the last that isn't it."""
    module = build(kind, Task.CLASSIFICATION)
    trunk = trunk_of(save(module, tmp_path))
    texts = [[5, PAD, 7, 8, PAD, PAD], [PAD], [9, 8, PAD]]
    for token_ids, found in zip(texts, logits(trunk, texts), strict=True):
        close(found, expected(module, token_ids))


@pytest.mark.parametrize("kind", ["Bert", "DistilBert", "Qwen3"])
def test_features_are_the_anchor_beside_the_mean(kind: str, tmp_path: Path) -> None:
    module = build(kind, Task.CLASSIFICATION)
    trunk = trunk_of(save(module, tmp_path))
    found = trunk.features(run(trunk, TEXTS))
    assert (tuple(found.shape), found.dtype) == ((len(TEXTS), 2 * WIDTH), torch.float32)
    for token_ids, row in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            hidden = module.base_model(torch.tensor([token_ids])).last_hidden_state[0]
        anchor = hidden[-1] if kind in DECODERS else hidden[0]
        close(row, torch.cat((anchor, hidden.mean(0))))


@pytest.fixture(scope="module", params=["Bert", "Qwen2"])
def shared_trunk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trunk:
    module = build(request.param, Task.CLASSIFICATION)
    return trunk_of(save(module, tmp_path_factory.mktemp("trunk")))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_survivors_go_on_as_if_alone(shared_trunk: Trunk, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    rows = shared_trunk.embed(texts)
    left = list(range(len(texts)))
    for index in range(shared_trunk.layers):
        keep = data.draw(st.lists(st.sampled_from(range(len(left))), min_size=1, unique=True))
        before = rows.hidden.clone()
        kept = shared_trunk.select(rows, keep)
        assert torch.equal(rows.hidden, before)
        left = [left[place] for place in keep]
        assert kept.lengths == tuple(lengths[place] for place in left)
        rows = shared_trunk.layer(index, kept)
    head = shared_trunk.own_head
    assert head is not None
    for place, found in zip(left, head(rows), strict=True):
        close(found[None], logits(shared_trunk, [texts[place]])[0])


def test_selecting_leaves_the_others_as_they_are(shared_trunk: Trunk) -> None:
    rows = shared_trunk.embed(TEXTS)
    before = rows.hidden.clone()
    shared_trunk.layer(0, shared_trunk.select(rows, range(len(TEXTS))))
    assert torch.equal(rows.hidden, before)


def test_what_is_not_finite_stays_in_its_text(shared_trunk: Trunk) -> None:
    rows = shared_trunk.embed(TEXTS)
    with torch.inference_mode():
        rows.hidden[1] = torch.nan  # of the second text
    rows = run(shared_trunk, TEXTS, first=rows)
    head = shared_trunk.own_head
    assert head is not None
    for found in (head(rows), shared_trunk.features(rows)):
        assert torch.isfinite(found).all(dim=1).tolist() == [index != 1 for index in range(len(TEXTS))]


class Memory:
    """Tensors of a slice that has no file."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def sliced(trunk: Trunk, tensors: dict[str, torch.Tensor], **adapters: Bottleneck) -> TaskSlice:
    """A slice with what `tensors` hold and adapters by layer ("l2")."""
    memory = Memory(tensors)
    layers = {}
    for index in range(trunk.layers):
        mlp, adapter = trunk.mlp(memory, index), adapters.get(f"l{index}")
        if mlp is not None or adapter is not None:
            layers[index] = LayerSlice(mlp, adapter)
    head = trunk.head(memory, Task.CLASSIFICATION, LABELS)
    return TaskSlice("t", Task.CLASSIFICATION, LABELS, layers, head, 0)


def mlp_tensors(trunk: Any, state: dict[str, torch.Tensor], *layers: int) -> dict[str, torch.Tensor]:
    names = [name for index in layers for group in trunk.mlp_modules(index) for name in group]
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in names}


def head_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in state.items()
        if name.startswith(("classifier", "pre_classifier", "score")) or "pooler" in name
    }


SLICED = ["Bert", "Roberta", "DistilBert", "Llama", "Qwen2"]


@pytest.mark.parametrize("kind", SLICED)
def test_slices_beside_each_other(kind: str, tmp_path: Path) -> None:
    """Replacements are the task's whole model, deltas are W + BA, adapters follow the feed-forward part."""
    module = build(kind, Task.CLASSIFICATION)
    trunk = trunk_of(save(module, tmp_path))
    other = build(kind, Task.CLASSIFICATION, seed=4).state_dict()

    tuned = build(kind, Task.CLASSIFICATION)
    replaced = {**mlp_tensors(trunk, other, 0, 2), **head_tensors(other)}
    tuned.load_state_dict(replaced, strict=False)

    low = build(kind, Task.CLASSIFICATION)
    name = trunk.mlp_modules(1)[0][-1]
    weight = low.get_parameter(f"{name}.weight")
    a, b = torch.randn(4, weight.shape[1]) / 4, torch.randn(weight.shape[0], 4) / 4
    weight.data += b @ a
    low.load_state_dict(head_tensors(other), strict=False)

    adapted = build(kind, Task.CLASSIFICATION)
    down, up = torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, WIDTH)
    last = adapted.get_submodule(trunk.mlp_modules(2)[1][0])
    last.register_forward_hook(lambda _module, _args, z: z + up(torch.nn.functional.gelu(down(z))))
    adapted.load_state_dict(head_tensors(other), strict=False)

    slices: dict[Any, TaskSlice | None] = {
        tuned: sliced(trunk, replaced),
        low: sliced(trunk, {f"{name}.delta_a": a, f"{name}.delta_b": b, **head_tensors(other)}),
        adapted: sliced(trunk, head_tensors(other), l2=Bottleneck(down.weight, down.bias, up.weight, up.bias)),
        module: None,
    }
    order = [tuned, low, module, adapted, tuned, module]
    with torch.inference_mode():
        rows = run(trunk, TEXTS, [slices[own] for own in order])
    for place, own in enumerate(order):
        own_slice = slices[own]
        head = trunk.own_head if own_slice is None else own_slice.head
        assert head is not None
        found = head(trunk.select(rows, [place]))
        close(found, expected(own, TEXTS[place]))
        with torch.inference_mode():
            close(head(run(trunk, [TEXTS[place]], [own_slice])), found)


@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_trained_heads(kind: str, tmp_path: Path) -> None:
    trunk = trunk_of(save(build(kind, Task.CLASSIFICATION), tmp_path))
    rows = run(trunk, TEXTS)
    weight, bias = torch.randn(3, 2 * WIDTH), torch.randn(3)
    whole = trunk.head(Memory({"head.weight": weight, "head.bias": bias}), Task.CLASSIFICATION, LABELS)
    close(whole(rows), trunk.features(rows) @ weight.t() + bias)
    tokens = trunk.head(Memory({"head.weight": weight[:, :WIDTH].clone()}), Task.TOKEN_CLASSIFICATION, LABELS)
    found = tokens(rows)
    assert tuple(found.shape) == (sum(LENGTHS), 3)
    close(found.split(LENGTHS)[1].mean(0), trunk.features(rows)[1, WIDTH:] @ weight[:, :WIDTH].t())


def test_slices_that_do_not_fit(tmp_path: Path) -> None:
    module = build("Llama", Task.CLASSIFICATION)
    trunk = trunk_of(save(module, tmp_path))
    gate = "model.layers.1.mlp.gate_proj"
    wrong = {
        r"gate_proj but not model\.layers\.1\.mlp\.up_proj": {f"{gate}.weight": torch.zeros(64, WIDTH)},
        r"down_proj\.weight has shape \[48, 63\]": {"model.layers.1.mlp.down_proj.weight": torch.zeros(WIDTH, 63)},
        r"gate_proj\.delta_b is missing": {f"{gate}.delta_a": torch.zeros(2, WIDTH)},
        r"delta_b has shape \[64, 3\]": {
            f"{gate}.delta_a": torch.zeros(2, WIDTH),
            f"{gate}.delta_b": torch.zeros(64, 3),
        },
    }
    for message, tensors in wrong.items():
        with pytest.raises(ModelLoadError, match=message):
            trunk.mlp(Memory(tensors), 1)
        assert trunk.mlp(Memory(tensors), 0) is None
    for message, tensors in {
        r"score\.weight is missing": {},
        r"head\.weight has shape \[2, 96\], and the model needs \[3, 96\]": {"head.weight": torch.zeros(2, 2 * WIDTH)},
    }.items():
        with pytest.raises(ModelLoadError, match=message):
            trunk.head(Memory(tensors), Task.CLASSIFICATION, LABELS)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_a_bare_trunk_and_a_head_of_a_slice(kind: str, tmp_path: Path) -> None:
    whole = build(kind, Task.CLASSIFICATION)
    model = loaded(save(whole.base_model, tmp_path))
    trunk = model.trunk
    assert trunk is not None and trunk.own_head is None and model.labels == ()
    assert not any(name.startswith(kind.lower()) for name in load_file(tmp_path / "model.safetensors"))
    head = trunk.head(Memory(head_tensors(whole.state_dict())), Task.CLASSIFICATION, LABELS)
    close(head(run(trunk, TEXTS)), torch.cat([expected(whole, token_ids) for token_ids in TEXTS]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "bert.encoder.layer.1.output.dense.bias",
            r"1 missing keys, such as bert\.encoder\.layer\.1\.output\.dense\.bias",
        ),
        ("bert.embeddings.token_type_embeddings.weight", r"token_type_embeddings"),
        ("bert.pooler.dense.weight", r"pooler\.dense\.weight"),
        ("classifier.weight", r"classifier\.weight"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(name: str, message: str, tmp_path: Path) -> None:
    folder = save(build("Bert", Task.CLASSIFICATION), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    good = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        loaded(folder)
    save_file({**tensors, name: torch.cat((good, good))}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"mismatched keys.*{name}"):
        loaded(folder)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_the_engine_does_not_know_stays_with_transformers(tmp_path: Path) -> None:
    module = build("Bert", Task.TOKEN_CLASSIFICATION)
    folder = save(module, tmp_path)
    edit(folder, hidden_act="tanh")
    model = loaded(folder, Task.TOKEN_CLASSIFICATION)
    assert model.trunk is None and model.labels == LABELS
    module.config.hidden_act = "tanh"
    with torch.inference_mode():
        other = type(module)(module.config).eval()
        other.load_state_dict(module.state_dict())
        close(model.module(torch.tensor([TEXTS[1]])).logits, other(torch.tensor([TEXTS[1]])).logits)
    edit(folder, architectures=["BertModel"])
    with pytest.raises(
        ModelLoadError, match=r"BertModel with this config\.json is no model that the engine computes itself"
    ):
        loaded(folder)


def test_roberta_has_fewer_positions_than_rows(tmp_path: Path) -> None:
    folder = save(build("Roberta", Task.CLASSIFICATION), tmp_path)
    assert loaded(folder).context_tokens == 300 - PAD - 1


@pytest.mark.parametrize("kind", ["Bert", "DistilBert", "Llama"])
def test_int8(kind: str, tmp_path: Path, quantise: Callable[[Path], Path]) -> None:
    module = build(kind, Task.CLASSIFICATION)
    folder = quantise(save(module, tmp_path))
    trunk = trunk_of(folder)
    assert "int8" in trunk.kernel
    together = torch.cat(logits(trunk, TEXTS))
    close(together, torch.cat([logits(trunk, [token_ids])[0] for token_ids in TEXTS]))
    wanted = torch.cat([expected(module, token_ids) for token_ids in TEXTS])
    assert float((together - wanted).abs().mean() / wanted.abs().mean()) < 0.25
    task = sliced(trunk, {**mlp_tensors(trunk, module.state_dict(), 0), **head_tensors(module.state_dict())})
    assert task.layers[0].mlp is not None


@pytest.fixture
def quantise() -> Callable[[Path], Path]:
    """Makes a folder's linears INT8, in place."""

    def change(folder: Path) -> Path:
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("weight") and "layer" in name]:
            weight = tensors[name]
            if weight.dim() == 2:
                scale = weight.abs().amax(1) / 127
                tensors[name] = (weight / scale[:, None]).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale
        save_file(tensors, folder / "model.safetensors")
        edit(folder, quantization_config={"quant_method": "sixfold-int8"})
        return folder

    return change
