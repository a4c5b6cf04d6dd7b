"""Text for calibration and evaluation: what is read, and what is refused."""

import contextlib
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold_api.precision import TextSource
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.text_checks import require_held_out, require_meaningful, require_varied
from sixfold_runtime.prepare.texts import Sample, TextReader, read_samples, windows, within

CHAT = Path(__file__).parents[2] / "examples" / "models" / "chat"
TEXT = CHAT.parent / "text"
RANDOM = random.Random(0)


@pytest.fixture(scope="module")
def reader():
    return TextReader(CHAT, ["negative", "positive"])


def source(samples=8):
    return TextSource(uri="pvc://models/text/file.jsonl", samples=samples)


def read(tmp_path, reader, rows, samples=8, labelled=False):
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_samples(path, source(samples), reader, Reason.UNUSABLE_CALIBRATION, labelled=labelled)


def speech(index):
    return {"text": f"Speech {index}: " + " ".join(f"word{index * 31 + at}" for at in range(20))}


def test_chats_go_through_the_models_template(reader):
    row = {"messages": [{"role": "user", "content": "Who's there?"}, {"role": "assistant", "content": "Nay, answer."}]}
    sample = reader.sample(3, row)
    assert sample.text == "<|begin|>USER:\nWho's there?\n\nASSISTANT:\nNay, answer.\n\n"
    assert sample.ids[0] == 1
    assert reader.tokenizer.decode(list(sample.ids)) == "USER:\nWho's there?\n\nASSISTANT:\nNay, answer.\n\n"


def test_the_first_samples_that_are_long_enough_count(tmp_path, reader):
    rows = [speech(0), {"text": "Ay."}, "", *map(speech, range(1, 12))]
    samples = read(tmp_path, reader, rows)
    assert [sample.line for sample in samples] == [1, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([speech(0)] * 3 + [{"text": "Ay."}], r"holds 3 samples \(1 lines have fewer than 16 tokens .* 8 are asked"),
        (["{broken"], "line 1: Expecting"),
        (['["a"]'], "line 1: it holds list"),
        ([{"prompt": "a"}], "line 1: it needs `text`, or `messages`"),
        ([{"messages": [{"role": "user"}]}], "line 1: the model's chat template refuses"),
        ([{"text": "a", "label": "neutral"}], "line 1: its label 'neutral' is none of the model's: negative, positive"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, reader, rows, message):
    with pytest.raises(PreparationError, match=message):
        read(tmp_path, reader, rows)


def test_a_short_file_will_do_for_evaluation_if_no_number_is_asked_for(tmp_path, reader):
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(json.dumps(speech(index)) for index in range(9)))
    asks_for_none = TextSource(uri="pvc://models/text/file.jsonl")
    assert len(read_samples(path, asks_for_none, reader, Reason.UNUSABLE_EVALUATION, labelled=False)) == 9
    with pytest.raises(PreparationError, match="9 samples and 128 are asked for"):
        read_samples(path, asks_for_none, reader, Reason.UNUSABLE_CALIBRATION, labelled=False)
    with pytest.raises(PreparationError, match="9 samples and 10 are asked for"):
        read_samples(path, source(10), reader, Reason.UNUSABLE_EVALUATION, labelled=False)


def test_all_lines_are_read_where_a_least_number_is_named(tmp_path, reader):
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(json.dumps({"text": "good", "label": 1}) for _ in range(200)))
    every = TextSource(uri="pvc://models/text/file.jsonl")
    options = {"reader": reader, "reason": Reason.UNUSABLE_TRAINING, "labelled": True}
    assert len(read_samples(path, every, needed=50, **options)) == 200
    assert len(read_samples(path, source(60), needed=50, **options)) == 60
    with pytest.raises(PreparationError, match="200 samples and 201 are asked for"):
        read_samples(path, every, needed=201, **options)
    with pytest.raises(PreparationError, match="60 samples and 70 are asked for"):
        read_samples(path, source(60), needed=70, **options)


def test_a_classifier_reads_no_empty_text(tmp_path, reader):
    rows = [{"text": "good", "label": 1}, {"text": " ", "label": 0}] * 4
    with pytest.raises(PreparationError, match="line 2: its text is empty") as refused:
        read(tmp_path, reader, rows, labelled=True)
    assert refused.value.reason is Reason.UNUSABLE_CALIBRATION


def test_a_label_that_the_head_lacks_has_its_own_reason(tmp_path, reader):
    with pytest.raises(PreparationError, match="line 1: its label 'neutral'") as refused:
        read(tmp_path, reader, [{"text": "a", "label": "neutral"}])
    assert refused.value.reason is Reason.LABEL_MISMATCH


@pytest.mark.parametrize(("length", "kept"), [(3, (0, 1, 2)), (4, (0, 1, 2, 3)), (9, (0, 1, 2, 8))])
def test_a_text_over_the_context_keeps_its_last_token(length, kept):
    assert within(tuple(range(length)), 4) == kept


def test_labels_by_name_and_by_index(tmp_path, reader):
    rows = [{"text": "good", "label": "positive"}, {"text": "bad", "label": 0}] * 4
    assert [sample.label for sample in read(tmp_path, reader, rows, labelled=True)] == [1, 0] * 4
    with pytest.raises(PreparationError, match="line 1: a classifier is measured on labelled text"):
        read(tmp_path, reader, [{"text": "good"}], labelled=True)


@given(st.text(max_size=200))
def test_any_line_is_a_sample_or_a_value_error(reader, line):
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(ValueError):
        assert reader.sample(1, row).line == 1


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(2, 9))
def test_windows_keep_every_token_but_single_ones(lengths, window_tokens):
    samples = [Sample(1, "", tuple(range(length))) for length in lengths]
    cut = windows(samples, window_tokens)
    assert all(2 <= len(window) <= window_tokens for window in cut)
    assert sum(map(len, cut)) == sum(length - (length % window_tokens == 1) for length in lengths)


def sample(line, ids):
    return Sample(line, " ".join(map(str, ids)), tuple(ids))


def some(count, seed=1):
    generator = random.Random(seed)
    return [sample(line, [generator.randrange(1000) for _ in range(64)]) for line in range(1, count + 1)]


def test_repeated_samples_are_refused():
    require_varied(some(20), "c", 128)
    with pytest.raises(PreparationError, match="18 of 20 samples repeat others"):
        require_varied([*some(2), *some(1) * 18], "c", 128)


@pytest.mark.parametrize("ids", [[7] * 64, [7, 8, 9] * 21])
def test_constant_samples_are_refused(ids):
    constant = [sample(line, [line + 100, *ids]) for line in range(3)]
    with pytest.raises(PreparationError, match="one thing over and over"):
        require_varied([*some(9), *constant], "c", 128)


def test_too_few_tokens_for_the_widest_layer_are_refused():
    with pytest.raises(PreparationError, match=r"1280 tokens, fewer than the widest layer has inputs \(4096\)"):
        require_varied(some(20), "c", 4096)


def counting_loss(ids):
    """A model that knows how to count: a token after its predecessor is certain, any other costs 7 nats."""
    return sum(0.0 if after == before + 1 else 7.0 for before, after in itertools.pairwise(ids)) / len(ids)


def test_text_that_means_nothing_to_the_model_is_refused():
    ordered = [sample(line, range(line, line + 64)) for line in range(1, 33)]
    assert require_meaningful(ordered, "c", counting_loss) > 5
    with pytest.raises(PreparationError, match=r"32 of 32 checked samples look random to the model, such as line 1"):
        require_meaningful(some(32), "c", counting_loss)
    with pytest.raises(PreparationError, match="4 of 32"):
        require_meaningful([*ordered[:28], *some(4)], "c", counting_loss)


def test_held_out_text_must_be_held_out():
    calibration, held_out = some(30), some(10, seed=2)
    require_held_out(calibration, held_out)
    with pytest.raises(PreparationError, match=r"line 4 of the evaluation text is in the calibration text too \(its"):
        require_held_out(calibration, [*held_out, calibration[3]])
    part = sample(77, calibration[3].ids[5:50])
    with pytest.raises(PreparationError, match="line 77"):
        require_held_out(calibration, [part])


def test_a_system_prompt_in_common_is_no_overlap():
    prompt = [RANDOM.randrange(1000) for _ in range(200)]
    calibration = [sample(one.line, [*prompt, *one.ids]) for one in some(30)]
    require_held_out(calibration, [sample(one.line, [*prompt, *one.ids]) for one in some(10, seed=2)])


def test_the_example_texts_are_apart_and_varied():
    reader = TextReader(CHAT)
    calibration, held_out = (
        read_samples(TEXT / f"{name}.jsonl", source(count), reader, Reason.UNEXPECTED, labelled=False)
        for name, count in (("calibration", 128), ("heldout", 48))
    )
    require_varied(calibration, "calibration.jsonl", 256)
    require_held_out(calibration, held_out)
