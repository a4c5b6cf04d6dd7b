"""Words of a text, by tokenizers that split in different ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sixfold_runtime.gateway.words import words

CORPUS = ["the old dog quickly ran home, and the cat ran after it"]


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", start)])
    return tokenizer


def _word_piece() -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["<s>", "[UNK]"], show_progress=False)
    return _trained(tokenizer, trainer)


def _byte_level() -> Tokenizer:
    """As GPT-2's and Llama 3's: white space belongs to the word behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    return _trained(tokenizer, trainer)


def _without_splits() -> Tokenizer:
    """As Llama 2's: no pre-tokenizer, so a text is one group."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>"], show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    _trained(tokenizer, trainer)
    tokenizer.pre_tokenizer = None
    return tokenizer


TOKENIZERS = {"word pieces": _word_piece(), "bytes": _byte_level(), "no splits": _without_splits()}
tokenizers = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@tokenizers
@given(text=st.text(max_size=40) | st.text("abé 你🎉,.\n\u3000\u200b", max_size=20))
def test_words_are_places_in_the_text(tokenizer: Tokenizer, text: str) -> None:
    encoding = tokenizer.encode(text)
    found = words(text, encoding)
    end = 0
    for word in found:
        piece = text[word.start : word.end]
        assert piece and piece == piece.strip()
        assert not any(character.isspace() for character in piece) or tokenizer is not TOKENIZERS["bytes"]
        assert not encoding.special_tokens_mask[word.token]
        assert word.start >= end - 1, "in order; bytes of one character may be two words"
        end = word.end
    tokens = [word.token for word in found]
    assert tokens == sorted(set(tokens))


@tokenizers
def test_sub_words_belong_together(tokenizer: Tokenizer) -> None:
    text = "  the  unseen dog\tran home"
    found = words(text, tokenizer.encode(text))
    assert [text[word.start : word.end] for word in found] == ["the", "unseen", "dog", "ran", "home"]


def test_the_first_token_decides() -> None:
    tokenizer = TOKENIZERS["word pieces"]
    text = "Thé cat, and"
    encoding = tokenizer.encode(text)
    found = words(text, encoding)
    assert [text[word.start : word.end] for word in found] == ["Thé", "cat", ",", "and"]
    assert found[0].token == 1, "the tokenizer's own start is no word"
    assert [encoding.word_ids[word.token] for word in found] == [0, 1, 2, 3]
    assert all(encoding.word_ids[word.token - 1] != encoding.word_ids[word.token] for word in found)


@tokenizers
@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_no_words(tokenizer: Tokenizer, text: str) -> None:
    assert words(text, tokenizer.encode(text)) == []
