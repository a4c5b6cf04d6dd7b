"""Exit heads, prepared as the Job prepares them: tiny real models learn to tell kinds of words apart."""

import json
import random
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.exit_heads import ExitHeads, load_exit_heads
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.loader import load

LABELS = ("low", "middle", "high")
LAYERS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "id2label": dict(enumerate(LABELS)),
    "label2id": {label: index for index, label in enumerate(LABELS)},
}
Row = dict[str, Any]
Prepare = Callable[..., Any]


def rows(count: int, seed: int) -> list[Row]:
    """Texts of 6 to 14 words, most of them of the kind that the label names."""
    dice = random.Random(seed)
    made = []
    for index in range(count):
        kind = index % 3
        words = [
            f"w{3 + 19 * (kind if dice.random() < 0.4 else dice.randrange(3)) + dice.randrange(19)}"
            for _ in range(dice.randint(6, 14))
        ]
        made.append({"text": " ".join(words), "label": LABELS[kind]})
    return made


def learn(module: Any, steps: int = 100) -> None:
    """Make a classifier of a random one, well enough to have something to agree with."""
    torch.manual_seed(0)
    optimiser = torch.optim.Adam(module.parameters(), lr=2e-3)
    texts = rows(1200, 77)
    dice = random.Random(0)
    module.train()
    for _ in range(steps):
        batch = dice.sample(texts, 32)
        ids = [[int(word[1:]) for word in row["text"].split()] for row in batch]
        longest = max(map(len, ids))
        inputs = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids])
        logits = module(input_ids=inputs, attention_mask=(inputs > 0).long()).logits
        functional.cross_entropy(logits, torch.tensor([LABELS.index(row["label"]) for row in batch])).backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory, classifier: Path) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    module = transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE))
    learn(module)
    module.save_pretrained(folder)
    shutil.copy(classifier / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory, classifier: Path) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_key_value_heads=2, pad_token_id=0, **SHAPE)
    module = transformers.LlamaForSequenceClassification(config)
    learn(module)
    module.save_pretrained(folder)
    shutil.copy(classifier / "tokenizer.json", folder)
    return folder


@pytest.fixture
def texts(claims: Path) -> dict[str, list[Row]]:
    """Training, calibration and evaluation text, before `write` puts them on the claim."""
    return {"training": rows(400, 1), "calibration": rows(400, 2), "evaluation": rows(200, 3)}


@pytest.fixture
def prepare(claims: Path, encoder: Path, texts: dict[str, list[Row]], run_prepare: Callable[..., Any]) -> Prepare:
    """Run the command on a copy of a model, with the texts as a test left them."""

    def run(*arguments: str, source: Path = encoder, **spec: Any) -> Any:
        if not (claims / "models" / "intent").exists():
            shutil.copytree(source, claims / "models" / "intent")
        for name, lines in texts.items():
            content = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
            (claims / "models" / f"{name}.jsonl").write_text(content)
        spec = {"training": address("training"), "maxDisagreement": "0.1"} | spec
        return run_prepare(
            "pvc://models/intent", "Classification",
            "--artifact-claim", "models", "--artifact-path", "out",
            "--exit-heads", json.dumps(spec),
            "--calibration", json.dumps(address("calibration")),
            "--evaluation", json.dumps(address("evaluation")),
            *arguments,
        )  # fmt: skip

    return run


def address(name: str) -> dict[str, str]:
    return {"uri": f"pvc://models/{name}.jsonl"}


def heads_of(folder: Path) -> ExitHeads:
    """As an engine loads them."""
    model = load(ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(folder)), torch.device("cpu"))
    assert model.trunk is not None
    heads = load_exit_heads(folder, model.trunk, trunk_fingerprint(TensorStore(folder)), model.labels)
    assert heads is not None
    return heads


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_heads_are_trained_calibrated_and_reported(
    kind: str, claims: Path, prepare: Prepare, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    prepared = prepare(source=source)
    assert prepared.facts.labels == list(LABELS)
    exits = prepared.summary.exits
    assert exits.layers == LAYERS
    assert exits.samples == 200
    assert float(exits.full_accuracy) > 0.7
    assert exits.calibrated.depths == [1, 2, 3]
    assert float(exits.calibrated.disagreement_bound) <= 0.1
    assert float(exits.calibrated.exit_rate) > 0.3
    assert float(exits.mean_layers) < LAYERS
    assert exits.quantile.depths == [2]
    out, intent = claims / "models" / "out", claims / "models" / "intent"
    assert (out / "model.safetensors").samefile(intent / "model.safetensors")
    assert not list((claims / "models").glob(".out*"))
    report = json.loads((out / "prepare-report.json").read_text())["exits"]
    assert {point["depth"] for point in report["surface"]} == {1, 2, 3}
    assert report["texts"] == {
        "training": 400, "calibration": 400, "evaluation": 200, "leftOut": 0, "cut": 0, "temperatures": 80,
    }  # fmt: skip
    plot = ElementTree.parse(out / "exits.svg").getroot()
    assert plot.tag.endswith("svg")
    assert re.search(r"held out: [0-9.]+% leave early", prepared.log)
    assert len(heads_of(out).calibration.lengths) == 320
    assert float(exits.calibration_error) < 0.1
    agree(out, source, texts=rows(40, 9))


def agree(out: Path, source: Path, texts: list[Row]) -> None:
    """The served heads say of transformers' hidden states what a linear layer over them says, and they learned."""
    heads = heads_of(out)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    stored = load_file(out / "exits.safetensors")
    is_decoder = hasattr(module, "score")
    right = 0
    for row in texts:
        ids = torch.tensor([[int(word[1:]) for word in row["text"].split()]])
        with torch.inference_mode():
            hidden = module.base_model(ids, output_hidden_states=True).hidden_states[2][0]
        features = torch.cat([hidden[-1 if is_decoder else 0], hidden.mean(dim=0)])[None]
        logits = features @ stored["exits.2.weight"].T + stored["exits.2.bias"]
        expected = (logits / stored["temperatures"][1]).softmax(dim=1)
        torch.testing.assert_close(heads.scores(2, features), expected, atol=1e-5, rtol=1e-4)
        right += LABELS[int(expected.argmax())] == row["label"]
    assert right > 0.6 * len(texts)


def test_the_same_text_makes_the_same_heads(claims: Path, prepare: Prepare) -> None:
    made = []
    for _ in range(2):
        assert prepare(depths=[1, 3]).exit_code == 0
        made.append((claims / "models" / "out" / "exits.safetensors").read_bytes())
    assert made[0] == made[1]
    assert heads_of(claims / "models" / "out").depths == (1, 3)


def test_the_trunk_may_learn_too(claims: Path, prepare: Prepare, encoder: Path) -> None:
    prepared = prepare(train="Trunk", distillation="0.5")
    assert prepared.exit_code == 0, prepared.log
    out, intent = claims / "models" / "out", claims / "models" / "intent"
    before, after = load_file(intent / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(encoder / "model.safetensors").items())
    report = json.loads((out / "prepare-report.json").read_text())["exits"]
    assert report["training"]["epochs"] == 1
    assert report["training"]["sourceAccuracy"] == pytest.approx(float(prepared.summary.exits.full_accuracy), abs=0.05)
    assert heads_of(out).depths == (1, 2, 3)


def test_exit_heads_and_slices_come_from_one_job(claims: Path, prepare: Prepare) -> None:
    slices = [{"name": "kind", "training": address("training"), "adapter": {"width": 4}}]
    prepared = prepare("--slices", json.dumps(slices))
    assert [entry.name for entry in prepared.summary.slices] == ["kind"], prepared.log
    assert prepared.summary.exits is not None
    out = claims / "models" / "out"
    assert (out / "slices" / "kind.safetensors").is_file()
    assert heads_of(out).depths == (1, 2, 3)


def test_without_an_admissible_threshold_every_text_runs_through(prepare: Prepare) -> None:
    prepared = prepare(maxDisagreement="0.001")
    exits = prepared.summary.exits
    assert (exits.calibrated.depths, exits.calibrated.exit_rate, float(exits.mean_layers)) == ([], "0", LAYERS)
    assert exits.accuracy == exits.full_accuracy
    assert "no threshold keeps disagreement within 0.1% at 95% confidence" in " ".join(prepared.log.split())


def test_lines_that_were_trained_on_are_left_out_and_counted(
    claims: Path, prepare: Prepare, texts: dict[str, list[Row]]
) -> None:
    texts["calibration"][:5] = texts["training"][:5]
    texts["evaluation"][0] = texts["calibration"][50]
    prepared = prepare()
    assert "6 lines of calibration and evaluation stand in another" in " ".join(prepared.log.split())
    report = json.loads((claims / "models" / "out" / "prepare-report.json").read_text())["exits"]
    assert report["texts"] | {"cut": 0} == {
        "training": 400, "calibration": 395, "evaluation": 199, "leftOut": 6, "cut": 0, "temperatures": 79,
    }  # fmt: skip


def test_texts_over_the_context_are_cut(claims: Path, prepare: Prepare, texts: dict[str, list[Row]]) -> None:
    texts["training"][7] = {"text": "w4 " * 300, "label": "low"}
    assert "1 texts are longer than 40 tokens" in prepare().log


BAD: dict[str, tuple[str, Callable[[list[Row]], Any], str, str]] = {
    "other label": (
        "training",
        lambda t: t[3].update(label="odd"),
        "LabelMismatch",
        "line 4: its label 'odd' is none of",
    ),
    "no label": ("calibration", lambda t: t[8].pop("label"), "UnusableCalibration", "line 9: .* add `label`"),
    "empty": ("training", lambda t: t[2].update(text=" "), "UnusableTraining", "line 3: its text is empty"),
    "no JSON": ("evaluation", lambda t: t.insert(1, "{"), "UnusableEvaluation", "evaluation.jsonl: line 2: Expecting"),  # type: ignore[arg-type]
    "few": ("calibration", lambda t: t.__delitem__(slice(49, None)), "UnusableCalibration", "49 samples and 50 are"),
    "few to learn": ("training", lambda t: t.__delitem__(slice(9, None)), "UnusableTraining", "9 samples and 50 are"),
    "class missing": (
        "calibration",
        lambda t: t.__setitem__(slice(None), [row for row in t if row["label"] != "high"]),
        "UnusableCalibration",
        "has no sample of high",
    ),
    "class unlearnt": (
        "training",
        lambda t: t.__setitem__(slice(None), [row for row in t if row["label"] == "low"]),
        "UnusableTraining",
        "has no sample of middle, high",
    ),
    "trained on": (
        "calibration",
        lambda t: t.__setitem__(slice(None), rows(400, 1)),
        "UnusableCalibration",
        r"400 of 400 lines stand in another file too, such as line 1 \(line 1 of pvc://models/training",
    ),
    "calibrated on": (
        "evaluation",
        lambda t: t.__setitem__(slice(100), rows(100, 2)),
        "UnusableEvaluation",
        "100 of 200 lines stand in another file too",
    ),
}


@pytest.mark.parametrize(("name", "spoil", "reason", "message"), BAD.values(), ids=BAD)
def test_unfit_text_is_refused_with_the_line(
    name: str,
    spoil: Callable[[list[Row]], Any],
    reason: str,
    message: str,
    claims: Path,
    prepare: Prepare,
    texts: dict[str, list[Row]],
) -> None:
    spoil(texts[name])
    failure = prepare().failure
    assert failure.reason == reason
    assert re.search(message, failure.message)
    assert not (claims / "models" / "out" / "exits.safetensors").exists()


def test_depths_must_lie_within_the_model(prepare: Prepare) -> None:
    failure = prepare(depths=[2, 4]).failure
    assert failure.reason == "InvalidDepths"
    assert "behind layers 1 to 3 of this model, and exitHeads.depths has 4" in failure.message


def test_weights_are_never_written_over_their_source(claims: Path, prepare: Prepare, encoder: Path) -> None:
    failed = prepare("--artifact-path", "intent")
    assert failed.failure.reason == "UnsafePath"
    assert "written over their source" in failed.failure.message
    kept = claims / "models" / "intent"
    assert {path.name for path in kept.iterdir()} >= {path.name for path in encoder.iterdir()}
    assert not (kept / "exits.safetensors").exists()


def test_features_that_are_no_numbers_are_refused(claims: Path, prepare: Prepare, encoder: Path) -> None:
    folder = Path(shutil.copytree(encoder, claims / "models" / "intent"))
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.encoder.layer.1.output.LayerNorm.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    failure = prepare().failure
    assert failure.reason == "NonFiniteWeights"
    assert re.search(r"line \d+: after \d layers the model computes NaN or infinite", failure.message)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    """A folder with exit heads that a test copies."""
    from sixfold_api.exit_heads import ExitHeads as Spec
    from sixfold_api.precision import TextSource
    from sixfold_runtime.prepare import exits

    claims = tmp_path_factory.mktemp("claims")
    folder = Path(shutil.copytree(encoder, claims / "models" / "intent"))
    sources = {}
    for seed, name in enumerate(("training", "calibration", "evaluation")):
        lines = "\n".join(json.dumps(row) for row in rows(150, seed))
        (claims / "models" / f"{name}.jsonl").write_text(lines)
        sources[name] = TextSource(uri=f"pvc://models/{name}.jsonl")
    order = exits.Order(Spec(training=sources["training"]), sources["calibration"], sources["evaluation"], claims)
    exits.make(folder, order, lambda line: None)
    return folder


def damaged(path: Path, **changed: Any) -> None:
    """Rewrite a file of exit heads with other tensors or metadata."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for name, value in changed.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            metadata[name] = value
    save_file(tensors, path, metadata)


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "other/1"}, "its format is 'other/1'"),
    "weights": ({"trunk": "sha256:0"}, "made for other weights"),
    "labels": ({"labels": '["a", "b"]'}, "its labels are a, b, and the model's low, middle, high"),
    "depth": ({"depths": "[1, 2, 4]"}, "don't ascend from 1 to 3"),
    "NaN": ({"exits.2.weight": torch.full((3, 64), torch.nan)}, "exits.2.weight holds NaN"),
    "shape": ({"exits.2.bias": torch.zeros(4)}, r"exits.2.bias has the shape \[4\] and not \[3\]"),
    "temperature": ({"temperatures": torch.zeros(3)}, "temperatures must be above 0"),
    "budget": ({"max_disagreement": "nan"}, "max_disagreement is nan"),
    "lengths": ({"calibration.lengths": torch.zeros(150, dtype=torch.int32)}, "its calibration"),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGE.values(), ids=DAMAGE)
def test_heads_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, served: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(served, tmp_path / "intent"))
    assert heads_of(folder).depths == (1, 2, 3)
    damaged(folder / "exits.safetensors", **changes)
    with pytest.raises(ModelLoadError, match=message):
        heads_of(folder)


def test_a_file_that_was_cut_off_is_refused(served: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(served, tmp_path / "intent"))
    path = folder / "exits.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"exits\.safetensors is damaged"):
        heads_of(folder)
