"""Tokenising and chat templates in the gateway against transformers' own."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sixfold_runtime.engine.protocol import TokenizerBundle
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.tokenizer import ModelTokenizer

MESSAGES = [
    {"role": "system", "content": "  spaces\n"},
    {"role": "user", "content": "<b>&amp;</b> 你好"},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "go on"},
]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "blocks are trimmed": "{% for m in messages %}\n    {% if m.role == 'user' %}\n"
    "{{ m.content | trim }}\n    {% endif %}\n{% endfor %}\n",
    "json": "{% for m in messages %}{{ m | tojson }}{{ eos_token }}{% endfor %}",
    "loop control": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "methods": "{{ messages[0]['content'].strip().split('a')[0].upper() }}",
}


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user says hello to the assistant"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return str(tokenizer.to_str())


def bundle(tokenizer_json: str, template: str) -> ModelTokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ModelTokenizer(TokenizerBundle(tokenizer_json, chat_template=template, special_tokens=special))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
async def test_like_transformers(tokenizer_json: str, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    theirs.backend_tokenizer.no_truncation()
    ours = bundle(tokenizer_json, template)
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.render(MESSAGES) == text
    assert await ours.encode_chat(MESSAGES, 4096) == theirs(text, add_special_tokens=False)["input_ids"]


async def test_special_tokens_come_once(tokenizer_json: str) -> None:
    ours = bundle(tokenizer_json, TEMPLATES["plain"])
    assert (await ours.encode_chat(MESSAGES, 4096)).count(0) == 1
    assert (await ours.encode("hello", 4096)).count(0) == 1


async def test_nothing_is_cut_or_padded(tokenizer_json: str) -> None:
    ours = bundle(tokenizer_json, "")
    assert len(await ours.encode("xyz", 4096)) == 4
    assert len(await ours.encode("xyz" * 5000, 10**6)) == 15001


async def test_of_far_too_long_texts_only_enough_is_read(tokenizer_json: str) -> None:
    assert 100 < len(await bundle(tokenizer_json, "").encode("xyz" * 10**6, 100)) < 5000


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_refuses_is_a_400(tokenizer_json: str, template: str) -> None:
    with pytest.raises(ApiError) as refused:
        bundle(tokenizer_json, template).render(MESSAGES)
    assert refused.value.status == 400


def test_without_a_template_there_is_no_chat(tokenizer_json: str) -> None:
    with pytest.raises(ApiError, match="no chat template"):
        bundle(tokenizer_json, "").render(MESSAGES)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"tokenizer_json": "{}"}', b"\xff"])
def test_damaged_bundles_are_value_errors(body: bytes) -> None:
    import msgspec

    with pytest.raises((ValueError, msgspec.MsgspecError)):
        ModelTokenizer.from_json(body)


def test_a_damaged_template_is_a_value_error(tokenizer_json: str) -> None:
    body = json.dumps({"tokenizer_json": tokenizer_json, "chat_template": "{% for %}"}).encode()
    with pytest.raises(ValueError, match="can't be used"):
        ModelTokenizer.from_json(body)
