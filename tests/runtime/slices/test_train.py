"""Slices trained over a frozen trunk: better than none and the same every time, or refused with the reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slice_models import CONTEXT, CPU, LAYERS, WIDTH, is_ffn, retuned, save_model
from typer.testing import CliRunner

from sixfold_api.precision import TextSource
from sixfold_api.scalars import Task
from sixfold_api.subgraphs import AdapterShape, SliceSpec
from sixfold_api.variant import PERMANENT_FAILURE_EXIT_CODE
from sixfold_runtime.engine.slice_file import slice_info, slice_path
from sixfold_runtime.prepare import int8, slices
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.slice_cli import app
from sixfold_runtime.prepare.slice_data import LabelledText, LabelledTexts, split
from sixfold_runtime.prepare.slice_measure import agreement
from sixfold_runtime.prepare.slice_model import AdaptedModel
from sixfold_runtime.prepare.slice_train import Recipe, Trained, train
from sixfold_runtime.prepare.slice_trunk import label_logits, open_trunk, token_logits
from sixfold_runtime.prepare.verify import verify

RECIPE = Recipe(AdapterShape(width=8, layers=2), epochs=6, learning_rate=1e-2, batch=16)
COLOURS = ("red", "green", "blue")


def sentence(order: random.Random, words: int) -> list[str]:
    return [f"w{order.randrange(3, 90)}" for _ in range(words)]


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """One of three words says the label."""
    order = random.Random(seed)
    rows = []
    for _ in range(count):
        label = order.randrange(3)
        words = sentence(order, order.randrange(2, 8))
        words[order.randrange(len(words))] = f"w{100 + label}"
        rows.append({"text": " ".join(words), "label": COLOURS[label]})
    return rows


def word_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Words are labelled by the half of the vocabulary that they are in; the last word of each has no label."""
    order = random.Random(seed)
    rows = []
    for _ in range(count):
        words = [f"w{order.randrange(3, 19)}" for _ in range(order.randrange(3, 9))]
        labels = ["high" if int(word[1:]) > 10 else "low" for word in words]
        rows.append({"tokens": words, "labels": [*labels[:-1], None]})
    return rows


def stories(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Words count upwards."""
    order = random.Random(seed)
    return [
        {"text": " ".join(f"w{begin + step}" for step in range(12))} for begin in order.choices(range(3, 60), k=count)
    ]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(trunk: Path, text: Path, task: Task = Task.CLASSIFICATION, name: str = "colour", **given: Any) -> Trained:
    return train(trunk, text, slice_path(trunk, name), task, print, **{"recipe": RECIPE, **given})


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Llama", "Qwen3"])
@pytest.mark.parametrize("task", [Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION])
def test_labels_are_learnt_over_each_trunk(kind: str, task: Task, tmp_path: Path) -> None:
    trunk = save_model(tmp_path / "trunk", kind, "ForSequenceClassification", initializer_range=0.1)
    rows = texts if task is Task.CLASSIFICATION else word_rows
    done = trained(trunk, lines(tmp_path / "text.jsonl", rows(300)), task)
    assert done.after.value > done.before.value + 0.1 and done.report.task is task
    info = slice_info(slice_path(trunk, "colour"))
    assert info.labels == (("blue", "green", "red") if task is Task.CLASSIFICATION else ("high", "low"))
    names = load_file(slice_path(trunk, "colour")).keys()
    assert {name.split(".")[1] for name in names if name.startswith("adapters.")} == {"1", "2"}
    assert done.report.size_bytes == info.size_bytes


def test_a_bare_trunk_learns_too(tmp_path: Path) -> None:
    trunk = save_model(tmp_path / "trunk", "Bert", "Model", initializer_range=0.1)
    done = trained(trunk, lines(tmp_path / "text.jsonl", texts(300)))
    assert done.after.value > done.before.value


def test_a_generator_learns(tmp_path: Path) -> None:
    trunk = save_model(tmp_path / "chat", "Llama", "ForCausalLM", initializer_range=0.1)
    text, held_out = lines(tmp_path / "text.jsonl", stories(150)), lines(tmp_path / "more.jsonl", stories(20, seed=1))
    done = trained(trunk, text, Task.GENERATION, evaluation=held_out)
    assert done.after.metric == "perplexity" and done.after.value < 0.8 * done.before.value
    assert all(name.startswith("adapters.") for name in load_file(slice_path(trunk, "colour")))


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Llama"])
@pytest.mark.parametrize("task", [Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION])
def test_what_is_trained_is_what_the_engine_computes(kind: str, task: Task, tmp_path: Path) -> None:
    """The loss of random adapters and a head, by the module that is trained and by the engine from its file."""
    from sixfold_runtime.engine.slice_file import write_slice

    trunk = open_trunk(save_model(tmp_path / "trunk", kind, "ForSequenceClassification"), CPU)
    names = {layer: trunk.host.mlp_modules(layer)[1][0] for layer in range(LAYERS)}
    model = AdaptedModel(trunk.folder, task, 3, names, 4, 0, CPU)
    random_values = torch.Generator().manual_seed(1)
    for tensor in model.parameters.values():
        tensor.data = torch.randn(tensor.shape, generator=random_values) * 0.3
    order = random.Random(0)
    ids = [tuple(order.randrange(3, 100) for _ in range(length)) for length in (1, 4, 9, 9, 20)]
    labels = [
        tuple(order.randrange(3) for _ in (text if task is Task.TOKEN_CLASSIFICATION else text[:1])) for text in ids
    ]
    ours = float(model.loss([LabelledText(*pair) for pair in zip(ids, labels, strict=True)]).detach())
    write_slice(path := slice_path(trunk.folder, "t"), model.parameters, task, ("a", "b", "c"), trunk.fingerprint)
    logits = list(label_logits(trunk.model, ids, trunk.load(path)))
    flat = torch.cat([each if each.ndim == 2 else each[None] for each in logits])
    wanted = torch.tensor([label for text in labels for label in text])
    assert float(torch.nn.functional.cross_entropy(flat, wanted)) == pytest.approx(ours, abs=2e-4)


@pytest.mark.parametrize(
    ("kind", "suffix", "task", "rows"),
    [
        ("Bert", "ForSequenceClassification", Task.CLASSIFICATION, texts(300)),
        ("Llama", "ForCausalLM", Task.GENERATION, stories(150)),
    ],
)
def test_quantised_trunks_learn_too(
    kind: str, suffix: str, task: Task, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Slices are made on the weights that answer."""
    full = save_model(tmp_path / "full", kind, suffix, initializer_range=0.1)
    linears = verify(full, tmp_path, task, {}, print).linears
    (tmp_path / "int8").mkdir()
    int8.quantise(full, tmp_path / "int8", linears)
    done = trained(tmp_path / "int8", lines(tmp_path / "text.jsonl", rows), task)
    assert done.after.is_better_than(done.before)


def test_the_same_text_and_seed_give_the_same_slice(tmp_path: Path) -> None:
    trunk = save_model(tmp_path / "chat", "Llama", "ForCausalLM", initializer_range=0.1)
    text = lines(tmp_path / "text.jsonl", stories(60))
    recipe = Recipe(AdapterShape(width=8), epochs=1, learning_rate=1e-2)
    contents = []
    for name in ("a", "b"):
        trained(trunk, text, Task.GENERATION, name, recipe=recipe)
        contents.append(slice_path(trunk, name).read_bytes())
    assert contents[0] == contents[1]


def test_it_starts_from_the_trunk_as_it_is(generator: Path) -> None:
    trunk = open_trunk(generator, CPU)
    names = {layer: trunk.host.mlp_modules(layer)[1][0] for layer in range(LAYERS)}
    ids = (5, 6, 7, 8)
    loss = AdaptedModel(generator, Task.GENERATION, 0, names, 4, 0, CPU).loss([LabelledText(ids, ())])
    logits = next(iter(token_logits(trunk.model, [ids], None)))
    assert float(loss.detach()) == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))), abs=1e-4
    )


def refusal(trunk: Path, text: Path, task: Task = Task.CLASSIFICATION, **given: Any) -> tuple[Reason, str]:
    path = slice_path(trunk, "colour")
    with pytest.raises(PreparationError) as raised:
        trained(trunk, text, task, **given)
    assert not path.exists() and not list(trunk.glob("slices/.*"))
    return raised.value.reason, str(raised.value)


@pytest.mark.parametrize(
    ("task", "rows", "problem"),
    [
        (Task.CLASSIFICATION, texts(49), "it holds 49 samples, and 50 are needed"),
        (Task.CLASSIFICATION, [*texts(60), {"text": "w5"}], "line 61: it has no label"),
        (Task.CLASSIFICATION, [*texts(60), {"label": "red"}], "line 61: it needs `text`"),
        (Task.CLASSIFICATION, [*texts(60), {"text": "w5", "label": 0.5}], "line 61: its label 0.5 is neither"),
        (Task.CLASSIFICATION, [*texts(60), "text"], "line 61: it has no label"),
        (Task.CLASSIFICATION, [{"text": "w5", "label": "red"}] * 60, "one label only, 'red'"),
        (Task.TOKEN_CLASSIFICATION, [*word_rows(60), {"tokens": ["w5"], "labels": []}], "has 1 tokens and 0 labels"),
        (Task.TOKEN_CLASSIFICATION, [*word_rows(60), {"tokens": ["w5"], "labels": [None]}], "none of its tokens has"),
        (Task.TOKEN_CLASSIFICATION, [*word_rows(60), {"tokens": [" "], "labels": ["low"]}], "none of them empty"),
        (Task.TOKEN_CLASSIFICATION, texts(60), "line 1: it needs `tokens`"),
    ],
)
def test_text_that_teaches_nothing_is_refused(
    task: Task, rows: list[Any], problem: str, own: Callable[[Path], Path], classifier: Path, tmp_path: Path
) -> None:
    reason, message = refusal(own(classifier), lines(tmp_path / "text.jsonl", rows), task)
    assert reason is Reason.UNUSABLE_TRAINING and problem in message and "text.jsonl" in message


def test_labels_that_were_given_must_be_those_of_the_text(
    own: Callable[[Path], Path], classifier: Path, tmp_path: Path
) -> None:
    trunk, text = own(classifier), lines(tmp_path / "text.jsonl", texts(60))
    assert "has the label 'blue', which is none of red, green" in refusal(trunk, text, labels=["red", "green"])[1]
    assert "no sample of the label 'pink'" in refusal(trunk, text, labels=[*COLOURS, "pink"])[1]
    other = lines(tmp_path / "more.jsonl", [{"text": "w5", "label": "pink"}] * 10)
    assert "more.jsonl: it has the label 'pink'" in refusal(trunk, text, evaluation=other)[1]


def test_a_loss_that_is_no_number_is_refused(own: Callable[[Path], Path], classifier: Path, tmp_path: Path) -> None:
    text = lines(tmp_path / "text.jsonl", texts(60))
    reason, message = refusal(own(classifier), text, recipe=Recipe(epochs=40, learning_rate=1e30))
    assert reason is Reason.UNUSABLE_TRAINING and "the loss became" in message and "learning rate" in message


def test_a_slice_that_is_no_better_is_refused(own: Callable[[Path], Path], classifier: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"], "label": "red" if index % 4 else "green"} for index, row in enumerate(texts(80))]
    text = lines(tmp_path / "text.jsonl", rows)
    reason, message = refusal(own(classifier), text, recipe=Recipe(AdapterShape(layers=1), 1, 1e-9))
    assert reason is Reason.UNUSABLE_SLICE and "is no better than without it" in message and "accuracy" in message


def test_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    rows = texts(300)
    rows[3]["text"] += " w5" * CONTEXT
    told: list[str] = []
    trunk = save_model(tmp_path / "trunk", "Bert", "ForSequenceClassification", initializer_range=0.1)
    text = lines(tmp_path / "text.jsonl", rows)
    train(trunk, text, slice_path(trunk, "colour"), Task.CLASSIFICATION, told.append, recipe=RECIPE)
    assert f"; 1 are longer than {CONTEXT} tokens and were cut there" in told[0]


def test_generators_neither_label_nor_classifiers_generate(
    own: Callable[[Path], Path], classifier: Path, generator: Path, tmp_path: Path
) -> None:
    text = lines(tmp_path / "text.jsonl", texts(60))
    for trunk, task in ((classifier, Task.GENERATION), (generator, Task.CLASSIFICATION)):
        reason, message = refusal(own(trunk), text, task)
        assert reason is Reason.UNUSABLE_SLICE and "can't have a slice" in message


def test_held_out_lines_are_no_part_of_the_training() -> None:
    windows = tuple(LabelledText((line, part), (), line) for line in range(60) for part in range(3))
    training, held_out = split(LabelledTexts(windows, (), 0), seed=1)
    assert not {text.line for text in training.texts} & {text.line for text in held_out.texts}
    assert len(held_out.texts) == 30 and len(training.texts) == 150


def test_agreement_leaves_out_words_without_a_label() -> None:
    score = agreement([0, 1, -100, 1], [0, 1, 1, 0])
    assert score.value == pytest.approx(2 / 3) and score.samples == 3
    assert score.macro_f1 == pytest.approx(2 / 3)


def test_the_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    trunk = save_model(tmp_path / "trunk", "Llama", "ForCausalLM", initializer_range=0.1)
    text = lines(tmp_path / "text.jsonl", stories(80))
    given = ["--trunk", str(trunk), "--task", "tale", "--text", str(text), "--kind", "Generation"]
    options = ["--adapter-width", "8", "--adapter-layers", "2", "--epochs", "2", "--learning-rate", "0.01"]
    result = run(app, ["train", *given, *options])
    assert result.exit_code == 0, result.output
    assert "perplexity" in result.output and slice_info(slice_path(trunk, "tale")).task is Task.GENERATION
    result = run(app, ["cut", "--trunk", str(trunk), "--checkpoint", str(trunk), "--task", "same"])
    assert result.exit_code == PERMANENT_FAILURE_EXIT_CODE and "UnusableSlice: trunk is trunk" in result.output
    assert run(app, ["cut", "--trunk", str(trunk), "--checkpoint", str(trunk), "--task", "No Name"]).exit_code == 2
    other = ["--out", str(tmp_path / "other.safetensors")]
    assert run(app, ["train", *given, *other]).exit_code == 2


def test_the_preparation_makes_and_verifies_them(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    (claims / "data").mkdir(parents=True)
    lines(claims / "data" / "tales.jsonl", stories(80))
    folder = save_model(tmp_path / "chat", "Llama", "ForCausalLM", initializer_range=0.1)
    source = TextSource(uri="pvc://data/tales.jsonl")
    specs = [SliceSpec(name="tale", training=source, adapter=AdapterShape(width=4, layers=2))]
    reports = slices.make(folder, specs, Task.GENERATION, claims, print)
    assert [(report.name, report.task) for report in reports] == [("tale", Task.GENERATION)]
    assert slices.make(folder, [SliceSpec(name="tale")], Task.GENERATION, claims, print) == reports
    assert slices.verify(folder) == reports
    retuned(folder, claims / "data" / "tuned", lambda name, tensor: tensor * 1.1 if is_ffn(name) else tensor)
    made = slices.make(folder, [SliceSpec(name="cut", checkpoint="pvc://data/tuned")], Task.GENERATION, claims, print)
    assert slices.verify(folder) == sorted(made + reports, key=lambda report: report.name)
    for spec, problem in (
        (SliceSpec(name="none"), "slice none: .*is missing"),
        (SliceSpec(name="tale", checkpoint="pvc://data/none"), "slice tale: .*has no folder"),
        (SliceSpec(name="tale", training=TextSource(uri="pvc://data/no.jsonl")), "slice tale: .*no file"),
    ):
        with pytest.raises(PreparationError, match=problem):
            slices.make(folder, [spec], Task.GENERATION, claims, print)
    tensors = load_file(slice_path(folder, "tale"))
    assert {tensor.shape[-1] for tensor in tensors.values()} == {4, WIDTH}
