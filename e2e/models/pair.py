"""The example pair of causal LMs: a 24-layer target trained on the plays and a one-layer draft distilled from it."""

from __future__ import annotations

from pathlib import Path

import torch
from cache import cached_folder, content_key, folder_bytes
from chat_tokenizer import CONTEXT_TOKENS, TURN_STOP, VOCABULARY_TOKENS, train_tokenizer
from checkpoint import load_chat_model, save_chat_model
from corpus import Corpus, chat_turns
from measure import measure_pair
from pair_cards import ModelFacts, draft_card, target_card
from plays import held_out_plays, load_heldout_prompts, render_turns, training_plays
from sources import SHAKESPEARE
from tiny_llama import Shape
from training import Generation, Phase, distil_draft, train_target, write_samples

SEED = 1
TARGET = Shape(
    layers=24, hidden=128, heads=4, kv_heads=2, ffn=256, vocabulary=VOCABULARY_TOKENS, context=CONTEXT_TOKENS
)
DRAFT = Shape(layers=1, hidden=128, heads=4, kv_heads=2, ffn=384, vocabulary=VOCABULARY_TOKENS, context=CONTEXT_TOKENS)
# Most of the learning happens at a quarter of the depth, where a step costs a quarter.
TARGET_PHASES = (
    Phase(layers=6, steps=750, windows=((8, 256),), muon_rate=0.02, adam_rate=0.005, warm_up=20, cool_down=1),
    Phase(
        layers=24,
        steps=240,
        windows=((8, 256), (8, 256), (4, 512), (2, 1024), (8, 256), (8, 256), (4, 512), (1, 2048)),
        muon_rate=0.02,
        adam_rate=0.005,
        warm_up=10,
        cool_down=200,
    ),
)
DRAFT_TEXTS = (
    Generation(batches=16, rows=64, tokens=192, prompt_tokens=(24, 48, 96, 144)),
    Generation(batches=6, rows=64, tokens=512, prompt_tokens=(32, 128, 256)),
    Generation(batches=2, rows=32, tokens=1536, prompt_tokens=(64, 512)),
)
DRAFT_PHASE = Phase(layers=1, steps=700, windows=(), muon_rate=0.02, adam_rate=0.005, warm_up=20, cool_down=400)
DRAFT_BATCH_TOKENS = 3072

MODULES = ("chat_tokenizer", "corpus", "optimiser", "pair", "plays", "tiny_llama", "training")


def build_target(folder: Path) -> None:
    """Tokenizer and target from the training plays."""
    plays = training_plays()
    as_written = [render_turns(turns) for turns in plays.values()]
    as_chats = ["".join(chat_turns(turns, parity=0)) for turns in plays.values()]
    tokenizer = train_tokenizer([*as_written, *as_chats])
    model = train_target(TARGET, TARGET_PHASES, Corpus(tokenizer, plays, SEED), SEED)
    save_chat_model(model, tokenizer, folder, stop_strings=(TURN_STOP,))


def build_draft(target_folder: Path, folder: Path) -> None:
    """Draft from what the saved (hence rounded) target writes. It only proposes tokens, so it has no stop."""
    target, tokenizer = load_chat_model(target_folder)
    corpus = Corpus(tokenizer, training_plays(), SEED + 1)
    samples = write_samples(target, corpus, DRAFT_TEXTS, SEED + 1)
    draft = distil_draft(target, DRAFT, samples, DRAFT_PHASE, DRAFT_BATCH_TOKENS, SEED + 1)
    save_chat_model(draft, tokenizer, folder, stop_strings=())


def build_pair() -> dict[str, Path]:
    """Folders of target and draft in the cache, trained, measured and described on the first call.

    Single-threaded, so that a machine repeats its own result.
    """
    torch.set_num_threads(1)
    key = content_key(MODULES, [SHAKESPEARE])
    target = cached_folder("chat", key, build_target)
    draft = cached_folder("chat-draft", key, lambda folder: build_draft(target, folder))
    folders = {"chat": target, "chat-draft": draft}
    if not all((folder / "README.md").exists() for folder in folders.values()):
        write_cards(target, draft)
    return folders


def write_cards(target_folder: Path, draft_folder: Path) -> None:
    """Measure a saved pair on the held-out plays and write its model cards."""
    target, tokenizer = load_chat_model(target_folder)
    draft, _ = load_chat_model(draft_folder)
    figures = measure_pair(target, draft, tokenizer, held_out_plays(), load_heldout_prompts())
    target_facts = ModelFacts(target.shape, target.parameter_count(), folder_bytes(target_folder), _target_recipe())
    draft_facts = ModelFacts(draft.shape, draft.parameter_count(), folder_bytes(draft_folder), _draft_recipe())
    (target_folder / "README.md").write_text(target_card(target_facts, figures))
    (draft_folder / "README.md").write_text(draft_card(draft_facts, figures))


def _target_recipe() -> str:
    phases = []
    for phase in TARGET_PHASES:
        windows = [phase.windows[step % len(phase.windows)] for step in range(phase.steps)]
        tokens = sum(rows * length for rows, length in windows)
        lengths = sorted({length for _, length in windows})
        spoken = " to ".join(f"{length:,}" for length in ([lengths[0], lengths[-1]] if lengths[1:] else lengths))
        phases.append(f"{phase.steps} steps with {phase.layers} layers on {tokens:,} tokens in windows of {spoken}")
    return (
        f"Muon and Adam: {'; then '.join(phases)}. Between the two the model grew without changing its function. "
        "Half of the windows have user and assistant as speakers. Contexts beyond the longest window are untrained."
    )


def _draft_recipe() -> str:
    tokens = sum(texts.batches * texts.rows * texts.tokens for texts in DRAFT_TEXTS)
    lengths = ", ".join(f"{texts.tokens:,}" for texts in DRAFT_TEXTS)
    return (
        f"KL divergence from `chat` on {tokens:,} tokens that `chat` wrote itself (temperatures 0 to 1, chat form, "
        f"sequences of {lengths} tokens), {DRAFT_PHASE.steps} steps of about {DRAFT_BATCH_TOKENS:,} tokens."
    )
