"""The analytic FLOPs model against what torch counts while each architecture computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.decoder_shape import decoder_shape
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.linear import DenseLinear
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.model_flops import model_flops, module_flops
from sixfold_runtime.engine.quantized_module import QuantizedModule
from sixfold_runtime.waste import decoder_flops

aten = torch.ops.aten
LABELS = {0: "bad", 1: "so-so", 2: "good"}
HEADS = {"id2label": LABELS, "label2id": {name: index for index, name in LABELS.items()}}
SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
DECODER = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
ENCODER = {**SMALL, "num_attention_heads": 4, "max_position_embeddings": 130}
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
DISTILBERT = {
    "vocab_size": 320,
    "dim": 64,
    "hidden_dim": 160,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 130,
}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ENCODERS = [
    ("Bert", {**ENCODER, **SPECIAL}),
    ("Roberta", {**ENCODER, **SPECIAL}),
    ("XLMRoberta", {**ENCODER, **SPECIAL}),
    ("DistilBert", {**DISTILBERT, **SPECIAL}),
]


def counted(compute: Callable[[], Any]) -> int:
    """What torch counts, with the products that are written in place, which it leaves out."""

    def addmm_(total: Any, left: Any, right: Any, out_shape: Any = None, **_: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    def baddbmm_(total: Any, left: Any, right: Any, out_shape: Any = None, **_: Any) -> int:
        return 2 * left[0] * left[1] * left[2] * right[2]

    mapping = {aten.addmm_: addmm_, aten.baddbmm_: baddbmm_}
    with FlopCounterMode(display=False, custom_mapping=mapping) as mode:
        compute()
    return mode.get_total_flops()


@pytest.fixture
def loaded(tmp_path: Path, new_decoder: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """A tiny model of an architecture with random weights, saved and loaded as the engine does it."""

    def make(name: str, end: str, changes: dict[str, Any]) -> LoadedModel:
        import transformers

        new_decoder(tmp_path)  # for its tokenizer
        extra = {} if end in ("ForCausalLM", "LMHeadModel") else HEADS
        config = getattr(transformers, f"{name}Config")(**changes, **extra)
        getattr(transformers, f"{name}{end}")(config).save_pretrained(tmp_path)
        task = {"ForSequenceClassification": Task.CLASSIFICATION, "ForTokenClassification": Task.TOKEN_CLASSIFICATION}
        served = ServedModel(name="model", task=task.get(end, Task.GENERATION), path=str(tmp_path))
        return load(served, torch.device("cpu"))

    return make


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", DECODER),
        ("Llama", {**DECODER, "tie_word_embeddings": True, "head_dim": 32, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2", DECODER),
        ("Qwen2", {**DECODER, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Qwen3", {**DECODER, "head_dim": 32}),
        ("GPT2", GPT2),
        ("Mistral", {**DECODER, "sliding_window": None}),
    ],
)
def test_ragged_forwards_cost_what_torch_counts(
    loaded: Callable[..., LoadedModel], name: str, changes: dict[str, Any]
) -> None:
    model = loaded(name, "LMHeadModel" if name == "GPT2" else "ForCausalLM", {**changes, "bos_token_id": 0})
    forward = make_forward(model)
    assert forward.kernel == ("transformers" if name in ("GPT2", "Mistral") else "sixfold")
    cache = forward.new_cache(3)
    steps = [
        ([[5] * 7, [6] * 20, [7] * 3], False),  # prompts
        ([[5], [6], [7]], False),  # a token each
        ([[5] * 4, [6], [7] * 2], True),  # drafts
        ([[5] * 40, [6] * 150, [7] * 40], False),
        ([[5], [6], [7]], False),
    ]
    for tokens, every_position in steps:
        flops = counted(lambda: forward(tokens, cache, every_position=every_position))  # noqa: B023
        assert sum(forward.spent) == flops
        starts = [length - len(row) for length, row in zip(cache.lengths, tokens, strict=True)]
        for start, row, spent in zip(starts, tokens, forward.spent, strict=True):
            outputs = len(row) if every_position else 1
            own = forward.flops.forward(len(row), len(row) * (start + len(row)), outputs)
            assert own <= spent, "what isn't its own is padding"


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "GPT2"])
def test_one_sequence_costs_what_transformers_computes(loaded: Callable[..., LoadedModel], name: str) -> None:
    """The reference: their own module, eager attention, no cache of ours."""
    import transformers

    is_gpt2 = name == "GPT2"
    model = loaded(name, "LMHeadModel" if is_gpt2 else "ForCausalLM", GPT2 if is_gpt2 else DECODER)
    module = transformers.AutoModelForCausalLM.from_pretrained(model.served.path, attn_implementation="eager").eval()
    ids = torch.randint(3, 320, (1, 50))
    flops = counted(lambda: module(ids))
    for shape in (model_flops(model), module_flops(module)):
        assert shape.forward(50, 50 * 50, 50) == flops


@pytest.mark.parametrize("end", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *ENCODERS,
        ("Llama", {**DECODER, **SPECIAL}),
        ("Qwen2", {**DECODER, **SPECIAL}),
        ("Qwen3", {**DECODER, **SPECIAL}),
    ],
)
def test_classifiers_cost_what_torch_counts(
    loaded: Callable[..., LoadedModel], name: str, end: str, changes: dict[str, Any]
) -> None:
    import transformers

    model = loaded(name, end, changes)
    trunk, flops = model.trunk, model_flops(model)
    assert trunk is not None and trunk.own_head is not None
    texts = [[5] * 20, [6] * 7, [7]]

    def through(layers: int) -> Any:
        rows = trunk.embed(texts)
        for index in range(layers):
            rows = trunk.layer(index, rows)
        return rows

    for layers in range(trunk.layers + 1):
        assert sum(flops.text(len(text), layers) for text in texts) == counted(lambda: through(layers))  # noqa: B023
    outputs = len(texts) if end == "ForSequenceClassification" else sum(map(len, texts))
    rows = through(trunk.layers)
    assert flops.forward(0, 0, outputs) == counted(lambda: trunk.own_head(rows))

    auto = getattr(transformers, f"AutoModel{end}")
    module = auto.from_pretrained(model.served.path, attn_implementation="eager").eval()
    padded = torch.tensor([text + [2] * (20 - len(text)) for text in texts])
    mask = (padded != 2).long()
    expected = counted(lambda: module(padded, attention_mask=mask))
    is_decoder = name in ("Llama", "Qwen2", "Qwen3")
    # transformers' decoders compute the head at every position, also where one is wanted.
    heads = 3 if end == "ForSequenceClassification" and not is_decoder else 60
    for shape in (flops, module_flops(module)):
        total = 3 * shape.text(20) + shape.forward(0, 0, heads)
        assert total == expected


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]),
    half_head=st.integers(1, 8),
    width=st.integers(1, 6),
    intermediate=st.integers(1, 40),
    layers=st.integers(1, 3),
    vocabulary=st.integers(2, 50),
    tokens=st.integers(1, 12),
)
def test_any_shape_of_a_decoder(
    heads: tuple[int, int], half_head: int, width: int, intermediate: int, layers: int, vocabulary: int, tokens: int
) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width * heads[0],
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=2 * half_head,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
    )
    shape = decoder_shape(config, ["LlamaForCausalLM"])
    assert shape is not None
    module = transformers.LlamaForCausalLM(config).eval()
    flops = counted(lambda: module(torch.zeros(1, tokens, dtype=torch.long)))
    assert decoder_flops(shape).forward(tokens, tokens**2, tokens) == flops


def test_quantised_linears_of_a_module_count_as_those_they_replace() -> None:
    import transformers

    config = transformers.GPTNeoXConfig(**DECODER, bos_token_id=0, eos_token_id=1)
    module = transformers.GPTNeoXForCausalLM(config)
    before = module_flops(module)
    for layer in module.base_model.layers:
        for name in ("dense_h_to_4h", "dense_4h_to_h"):
            setattr(layer.mlp, name, QuantizedModule(DenseLinear(getattr(layer.mlp, name).weight)))
    assert module_flops(module) == before
