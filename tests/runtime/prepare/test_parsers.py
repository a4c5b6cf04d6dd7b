"""Parsers of the preparation meet arbitrary bytes, and the termination message always fits."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold_api.exit_heads import ExitChoice, ExitReport
from sixfold_api.scalars import Task
from sixfold_api.subgraphs import SliceReport
from sixfold_api.variant import ArtifactFacts, PreparationFailure, PreparationSummary
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.summary import encode
from sixfold_runtime.prepare.weights import parse_header

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "X9"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(-1, 64), st.integers(-1, 64)).map(list) | JSON,
    },
)


@given(st.binary(max_size=64) | st.dictionaries(st.text(max_size=6), ENTRIES | JSON, max_size=4).map(json.dumps))
@settings(max_examples=300, deadline=None)
def test_any_header_is_understood_or_refused(header):
    data = header.encode() if isinstance(header, str) else header
    try:
        entries = parse_header("model.safetensors", data, 48)
    except PreparationError as error:
        assert error.reason in (Reason.CORRUPT_WEIGHTS, Reason.UNSUPPORTED_FORMAT)
        assert "model.safetensors" in str(error)
    else:
        assert entries[0].begin == 0
        assert entries[-1].end == 48


def test_a_hole_between_tensors_is_refused():
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    try:
        parse_header("f", json.dumps(header).encode(), 12)
    except PreparationError as error:
        assert "the bytes of b begin at 8 and should begin at 4" in str(error)
    else:
        raise AssertionError("a hole went through")


FACTS = st.builds(
    lambda architecture, labels: ArtifactFacts(
        digest="sha256:" + "0" * 64,
        size_bytes=2**60,
        parameters=2**60,
        architecture=architecture,
        dtype="bfloat16",
        context_tokens=4096,
        vocabulary_tokens=1,
        tokenizer_fingerprint="sha256:" + "1" * 64,
        labels=labels,
    ),
    st.text(max_size=128),
    st.lists(st.text(max_size=63), max_size=256),
)
FAILURES = st.builds(lambda text: PreparationError(Reason.UNEXPECTED, text).failure(), st.text(max_size=3000))


@given(FACTS)
@settings(max_examples=60, deadline=None)
def test_facts_fit_and_come_back(facts):
    text = encode(PreparationSummary(facts=facts))
    assert len(text) <= 4096
    back = PreparationSummary.model_validate_json(text).facts
    assert back is not None
    assert back.labels == facts.labels[: len(back.labels)]
    assert back.model_copy(update={"labels": facts.labels}) == facts


CHOICES = st.integers(0, 64).map(
    lambda exits: ExitChoice(
        depths=list(range(192, 192 + exits)),
        thresholds=["0.123456"] * exits,
        exit_rate="0.123456",
        mean_layers="123.123456",
        disagreement="0.123456",
        disagreement_bound="0.123456",
    )
)
EXITS = st.tuples(CHOICES, CHOICES).map(
    lambda choices: ExitReport(
        layers=256,
        calibrated=choices[0],
        quantile=choices[1],
        samples=2**31,
        mean_layers="123.123456",
        disagreement="0.123456",
        accuracy="0.123456",
        full_accuracy="0.123456",
        calibration_error="0.123456",
    )
)
SLICES = st.integers(0, 32).map(
    lambda count: [SliceReport(name="a" * 40, task=Task.TOKEN_CLASSIFICATION, size_bytes=2**40)] * count
)


@given(FACTS, EXITS, SLICES)
@settings(max_examples=60, deadline=None)
def test_exits_and_slices_fit_and_come_back(facts, exits, slices):
    text = encode(PreparationSummary(facts=facts, exits=exits, slices=slices))
    assert len(text) <= 4096
    back = PreparationSummary.model_validate_json(text)
    assert back.exits == exits
    assert back.slices == slices[: len(back.slices)]
    assert back.slices == slices or back.facts.labels == [], "labels are the first to go"


@given(FAILURES | st.just(PreparationFailure(reason="Unexpected", message="\U0001f600" * 1024)))
@settings(max_examples=60, deadline=None)
def test_failures_fit_and_come_back(failure):
    text = encode(PreparationSummary(failure=failure))
    assert len(text) <= 4096
    back = PreparationSummary.model_validate_json(text).failure
    assert back is not None
    assert back.reason == failure.reason
