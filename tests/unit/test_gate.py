"""The gate's comparison, workload and file, and what the command says to wrong input."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from sixfold_runtime.cli import app
from sixfold_runtime.gate import record
from sixfold_runtime.gate.command import Outcome, percentage
from sixfold_runtime.gate.compare import Verdict, compare
from sixfold_runtime.gate.record import ALL, Figure, GateError, Machine, Metric, Record, Workload
from sixfold_runtime.gate.show import document, markdown, verdict
from sixfold_runtime.gate.workload import Served, digest, workload

WORKFLOW = Path(__file__).parents[2] / "examples" / "ci" / "cost-gate.yaml"
MACHINE = Machine("A CPU", 4, "cpu", 1)
KIND = "generate short"
STEADY = [1.0, 1.01, 0.99, 1.0, 1.0]
SERVED = Served(
    generates=True, context_tokens=4096, classifies=True, classification_tasks=("topic",), generation_tasks=("haiku",)
)


def measured(*figures: Figure, **changes: object) -> Record:
    made = Record(
        made="2030-01-01T00:00:00+00:00",
        policy="bot",
        level=3,
        modes=["Speculative"],
        machine=MACHINE,
        versions={"torch": "2.9"},
        workload=Workload("d", 8, 5),
        figures=list(figures),
        answers={KIND: [["a"], ["b"]]},
    )
    return msgspec.structs.replace(made, **changes)


def seconds(*values: float, paces: list[float] | None = None) -> Figure:
    return Figure(KIND, Metric.ENGINE_SECONDS, list(values), paces or [])


def verdicts(baseline: Record, candidate: Record, limit: float = 0.1) -> list[Verdict]:
    return [row.verdict for row in compare(baseline, candidate, limit).rows]


@pytest.mark.parametrize(
    ("metric", "before", "after", "expected"),
    [
        (Metric.ENGINE_SECONDS, 1.0, 1.05, Verdict.OK),
        (Metric.ENGINE_SECONDS, 1.0, 1.3, Verdict.WORSE),
        (Metric.ENGINE_SECONDS, 1.0, 0.5, Verdict.BETTER),
        (Metric.TOKENS_PER_SECOND, 100.0, 80.0, Verdict.WORSE),
        (Metric.TOKENS_PER_SECOND, 100.0, 200.0, Verdict.BETTER),
        (Metric.MEMORY_BYTES, 2.0**30, 2.0**31, Verdict.WORSE),
        # Five points more of little waste are 6 % more operations; of much waste they are a quarter more.
        (Metric.WASTED_FLOPS_RATIO, 0.02, 0.07, Verdict.OK),
        (Metric.WASTED_FLOPS_RATIO, 0.75, 0.80, Verdict.WORSE),
        (Metric.WASTED_FLOPS_RATIO, 0.5, 1.0, Verdict.WORSE),
        (Metric.FLOPS, 0.0, 0.0, Verdict.OK),
    ],
)
def test_what_is_over_the_limit(metric: Metric, before: float, after: float, expected: Verdict) -> None:
    old, new = (measured(Figure(KIND, metric, [value] * 5)) for value in (before, after))
    assert verdicts(old, new) == [expected]


def test_what_repeats_differ_by_is_no_verdict() -> None:
    noisy = measured(seconds(0.7, 0.9, 1.0, 1.2, 1.5))
    worse = measured(seconds(*(1.3 * value for value in STEADY)))
    assert verdicts(noisy, worse) == [Verdict.OK]
    assert verdicts(measured(seconds(*STEADY)), worse) == [Verdict.WORSE]


def test_one_bad_repeat_neither_fails_nor_hides() -> None:
    outlier = seconds(*STEADY[:4], 9.0)
    assert verdicts(measured(seconds(*STEADY)), measured(outlier)) == [Verdict.OK]
    assert verdicts(measured(outlier), measured(seconds(*(1.3 * value for value in STEADY)))) == [Verdict.WORSE]


def test_a_machine_that_is_slow_for_a_while_isnt_the_candidates_fault() -> None:
    old = measured(seconds(*STEADY, paces=[0.01] * 5))
    slow = measured(seconds(*(2 * value for value in STEADY), paces=[0.02] * 5))
    assert verdicts(old, slow) == [Verdict.OK]
    assert any("2 times as long" in warning for warning in compare(old, slow, 0.1).warnings)
    rate = [measured(Figure(KIND, Metric.TOKENS_PER_SECOND, [100 / pace], [pace])) for pace in (1.0, 2.0)]
    assert verdicts(*rate) == [Verdict.OK]


def test_times_of_another_machine_dont_decide() -> None:
    memory = [Figure(ALL, Metric.MEMORY_BYTES, [size] * 5) for size in (1e6, 2e6)]
    old = measured(seconds(*STEADY), memory[0])
    new = measured(seconds(9, 9, 9, 9, 9), memory[1], machine=Machine("Another CPU", 64, "cpu", 8))
    found = compare(old, new, 0.1)
    assert [row.verdict for row in found.rows] == [Verdict.NOT_COMPARED, Verdict.WORSE]
    assert "another machine (A CPU, 4 CPUs, cpu; here Another CPU" in found.warnings[0]


def test_what_is_new_and_what_is_gone() -> None:
    other = Figure("classify text", Metric.ENGINE_SECONDS, [1.0])
    assert verdicts(measured(seconds(1.0)), measured(other)) == [Verdict.GONE, Verdict.NEW]
    found = compare(measured(seconds(1.0)), measured(other), 0.1)
    assert "doesn't serve this any more" in verdict(Outcome(measured(other), found, ()))[0]


def test_answers_versions_and_modes_that_changed_are_told() -> None:
    new = measured(answers={KIND: [["a", "x"], ["c"]]}, versions={"torch": "3.0"}, modes=[])
    found = compare(measured(), new, 0.1)
    assert [(one.same, one.total) for one in found.agreement] == [(1, 2)]
    told = "\n".join(found.warnings)
    for words in ("1 of 2 greedy answers changed", "torch 2.9, this is 3.0", "off in the candidate: Speculative"):
        assert words in told
    assert not found.failures


def test_pages_for_people_and_machines() -> None:
    old, new = measured(seconds(*STEADY)), measured(seconds(*(2 * value for value in STEADY)))
    outcome = Outcome(new, compare(old, new, 0.1), ("beware",))
    page = markdown(outcome)
    assert "| generate short | engine ms a request | 1,000 | 2,000 | 100.0 % | 0.0 % | **worse** |" in page
    assert "**Failed: generate short: engine ms a request 1,000 -> 2,000, worse by 100.0 % (limit 10.0 %" in page
    assert "⚠️ beware" in page
    found = document(outcome)
    assert (found["passed"], found["figures"][0]["verdict"]) == (False, "worse")
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


@given(requests=st.integers(4, 200), context=st.integers(64, 10_000), seed=st.integers(0, 9))
def test_the_workload_is_fixed_and_covers_what_is_served(requests: int, context: int, seed: int) -> None:
    served = Served(True, context, ("haiku",), True, ("topic",))
    loads = workload(served, requests, seed)
    assert loads == workload(served, requests, seed)
    assert digest(loads) != digest(workload(served, requests, seed + 1))
    assert [load.kind for load in loads] == [
        "generate short", "generate dialogue", "generate task haiku", "classify text", "classify task topic"
    ]  # fmt: skip
    assert all(0 < load.requests <= max(requests, 6) for load in loads)
    for load in loads:
        for burst in load.bursts:
            assert all(len(ask.turns) % 2 == 1 for ask in burst), "the user speaks first and last"


def test_turns_of_a_dialogue_begin_with_those_before() -> None:
    dialogue = workload(SERVED, 24)[1]
    said: dict[str, tuple[str, ...]] = {}
    for burst in dialogue.bursts:
        for ask in burst:
            assert ask.turns[: len(said.get(ask.conversation, ()))] == said.get(ask.conversation, ())
            said[ask.conversation] = ask.turns
    assert (len(said), {len(turns) for turns in said.values()}) == (4, {11})


def test_nothing_is_asked_of_what_isnt_served() -> None:
    assert [load.kind for load in workload(Served(classification_tasks=("topic",)), 8)] == ["classify task topic"]


def test_a_baseline_comes_back_as_it_was(tmp_path: Path) -> None:
    kept = measured(seconds(*STEADY), cost_per_hour={KIND: 0.08}, waste={"padding": 0.1})
    record.write(tmp_path / "new" / "cost.json", kept)
    assert record.read(tmp_path / "new" / "cost.json") == kept
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["cost.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is no baseline"),
        (b'{"schema": "other"}', "make it again with --update-baseline"),
        (msgspec.json.encode(measured(schema="sixfold.dev/gate/v0")), "has the schema 'sixfold.dev/gate/v0'"),
        (msgspec.json.encode(measured(seconds())), "a figure has no values"),
    ],
)
def test_a_file_that_is_no_baseline(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "cost.json").write_bytes(content)
    with pytest.raises(GateError, match=r"cost\.json") as error:
        record.read(tmp_path / "cost.json")
    assert words in str(error.value)


def test_the_example_workflow_gives_options_that_exist() -> None:
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["gate"]
    commands = [step["run"] for step in job["steps"] if step.get("run", "").startswith("sixfold gate ")]
    known = {option for parameter in get_command(app).commands["gate"].params for option in parameter.opts}
    assert len(commands) == 2
    for command in commands:
        assert {word for word in command.split() if word.startswith("-")} <= known


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("2.5 %", 0.025), ("0%", 0.0)])
def test_percentages(text: str, share: float) -> None:
    assert percentage(text) == share


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the policy and its variants"),
        (["-f", "nowhere.yaml"], "there is no baseline"),
        (["-f", "nowhere.yaml", "--update-baseline"], "nowhere.yaml: No such file or directory"),
        (["-f", "nowhere.yaml", "--limit", "0.1"], "expected a percentage such as 10%"),
        (["-f", "nowhere.yaml", "--limit", "-5%"], "expected a percentage such as 10%"),
        (["-f", "nowhere.yaml", "--claim", "models"], "expected CLAIM=FOLDER"),
    ],
)
def test_what_is_wrong_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["gate", "--baseline", str(tmp_path / "cost.json"), *arguments])
    assert (done.exit_code, words in done.output) == (2, True), done.output
