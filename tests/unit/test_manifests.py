"""Resource files: errors name file and field; serving and explaining from them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sixfold_runtime import local, manifests
from sixfold_runtime.cli import app
from sixfold_runtime.manifests import ManifestError
from sixfold_runtime.settings import RuntimeSettings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HEAD = "apiVersion: sixfold.dev/v1alpha1\nkind: InferencePolicy\nmetadata: {name: p}\n"
VARIANT = """
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: chat}
spec: {task: Generation, source: {uri: pvc://models/chat}}
"""
SPEC = "spec: {generation: {variantRef: {name: chat}}}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (HEAD, "at least one of spec.generation and spec.classification is needed"),
        (HEAD + "spec: {rollbackLevel: 9}", "rollbackLevel: Input should be less than or equal to 3"),
        (HEAD + "spec: {rolbackLevel: 1}", "rolbackLevel: unknown field"),
        (HEAD + "spec: []", "InferencePolicy/p: spec: Input should be"),
        (HEAD + "spec: {generation: {variantRef: {name: A_B}}}", "generation.variantRef.name: String should match"),
        (HEAD.replace("{name: p}", "{}") + SPEC, "metadata.name"),
        (HEAD.replace("name: p", "name: 9p") + SPEC, "metadata.name"),
        (HEAD.replace("metadata: {name: p}", "metadata: 5") + SPEC, "metadata.name"),
        ("a: [", "not valid YAML"),
        ("- a", "not an object but list"),
        ("\x00", "not valid YAML"),
        ("a: &x [*x]\n---\n5", "not an object but int"),
    ],
)
def test_what_is_wrong_and_where(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(content)
    with pytest.raises(ManifestError) as refused:
        manifests.read([path])
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        manifests.read([tmp_path / "missing.yaml"])


def test_folders_and_other_kinds() -> None:
    found = manifests.read([EXAMPLES])
    assert [policy.name for policy in found.policies] == ["assistant"]
    assert {variant.name for variant in found.variants} >= {"chat", "film-sentiment"}


@pytest.mark.parametrize(
    ("files", "claims", "said"),
    [
        ([HEAD + SPEC], {}, "no file has a ModelVariant chat"),
        ([HEAD + SPEC, VARIANT], {}, "--claim models=FOLDER"),
        ([HEAD + SPEC, VARIANT], {"models": "missing"}, "missing/chat is not a folder"),
        ([HEAD + SPEC, VARIANT.replace("Generation", "Classification")], {"models": "."}, "task Classification"),
        ([VARIANT], {}, "exactly one InferencePolicy"),
        ([HEAD + SPEC, HEAD.replace("name: p", "name: q") + SPEC], {}, "the files have: p, q"),
    ],
)
def test_what_cant_be_served(tmp_path: Path, files: list[str], claims: dict[str, str], said: str) -> None:
    paths = []
    for index, content in enumerate(files):
        paths.append(tmp_path / f"{index}.yaml")
        paths[-1].write_text(content)
    folders = {claim: tmp_path / folder for claim, folder in claims.items()}
    with pytest.raises(ManifestError) as refused:
        local.load(paths, folders, None, RuntimeSettings())
    assert said in str(refused.value)


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    (tmp_path / "chat").mkdir()
    (tmp_path / "variant.yaml").write_text(VARIANT)
    path = tmp_path / "policy.yaml"
    path.write_text(HEAD + SPEC)
    return path


def load(policy_file: Path) -> local.LocalSetup:
    folder = policy_file.parent
    return local.load([policy_file, folder / "variant.yaml"], {"models": folder}, None, RuntimeSettings())


def test_an_edit_takes_effect_and_a_bad_one_doesnt(policy_file: Path) -> None:
    config = load(policy_file).config
    assert config.current.stable.level == 3
    policy_file.write_text(HEAD + SPEC.replace("{gen", "{rollbackLevel: 1, gen"))
    config.poll()
    assert config.current.stable.level == 1
    for bad, said in (
        (HEAD + SPEC.replace("{gen", "{rollbackLevel: -1, gen"), "rollbackLevel"),
        (HEAD + SPEC.replace("chat", "other"), "needs a restart here"),
        (HEAD.replace("name: p", "name: q") + SPEC, "no InferencePolicy p"),
        ("{", "not valid YAML"),
    ):
        policy_file.write_text(bad)
        config.poll()
        assert config.current.stable.level == 1
        assert said in config.error
        assert config.error.count(str(policy_file)) == 1
    policy_file.write_text(HEAD + SPEC)
    config.poll()
    assert (config.current.stable.level, config.error) == (3, "")


def test_what_lies_in_secrets_of_a_cluster_is_given_on_the_command_line(
    policy_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generation = "{variantRef: {name: chat}, kvCacheReuse: {store: Redis, redis: {urlSecretRef: {name: r, key: url}}}}"
    spec = f"spec: {{generation: {generation}, streaming: {{dictionaryConfigMapRef: {{name: d, key: d}}}}}}\n"
    setup = load(policy_file)
    assert setup.warnings == ()
    policy_file.write_text(HEAD + spec)
    setup.config.poll()
    told = "keys and values stay in this process: spec.generation.kvCacheReuse.redis needs --redis DIRECTORY here"
    assert told in caplog.text
    assert setup.config.current.stable.kv_reuse is not None
    redis, dictionary = load(policy_file).warnings
    assert redis.startswith(told)
    assert "--stream-dictionary FILE" in dictionary
    given = RuntimeSettings(redis_directory=policy_file.parent, stream_dictionary_directory=policy_file.parent)
    files, claims = [policy_file, policy_file.parent / "variant.yaml"], {"models": policy_file.parent}
    whole = local.load(files, claims, None, given)
    assert whole.warnings == ()
    assert whole.settings.redis_directory == policy_file.parent


EXITING = """
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: intent}
spec:
  task: Classification
  source: {uri: pvc://models/bert}
  exitHeads: {training: {uri: pvc://models/t.jsonl}}
  calibration: {uri: pvc://models/c.jsonl}
  evaluation: {uri: pvc://models/e.jsonl}
  artifact: {claimName: made}
"""


def test_heads_that_nobody_made_here_leave_the_source_to_answer(tmp_path: Path) -> None:
    """The weights are the same: only early exit is off, with the reason."""
    (tmp_path / "bert").mkdir()
    (tmp_path / "variant.yaml").write_text(EXITING)
    (tmp_path / "policy.yaml").write_text(HEAD + "spec: {classification: {variantRef: {name: intent}, earlyExit: {}}}")
    files, claims = (
        [tmp_path / "policy.yaml", tmp_path / "variant.yaml"],
        {"models": tmp_path, "made": tmp_path / "out"},
    )
    setup = local.load(files, claims, None, RuntimeSettings())
    assert [model.path for model in setup.settings.models] == [str(tmp_path / "bert")]
    assert setup.config.current.stable.early_exit is None
    (tmp_path / "variant.yaml").write_text(EXITING.replace("exitHeads: {", "exitHeads: {train: Trunk, "))
    with pytest.raises(ManifestError, match="intent isn't prepared here"):
        local.load(files, claims, None, RuntimeSettings())


START = "<|begin|>"
QUANTIZED = VARIANT.replace("name: chat", "name: small").replace(
    "source: {uri: pvc://models/chat}",
    "source: {variantRef: {name: chat}}, precision: {scheme: INT8}, artifact: {claimName: made},"
    " evaluation: {uri: pvc://models/text.jsonl}",
)
DRAFT = VARIANT.replace("name: chat", "name: tiny").replace("pvc://models/chat", "pvc://models/tiny")
CHEAP = SPEC.replace(
    "{name: chat}}}",
    "{name: chat}, quantized: {variantRef: {name: small}},"
    " speculative: {draftVariantRef: {name: tiny}, draftDevice: CPU}}, engine: {fullWeights: Swap}}",
)


def load_cheap(tmp_path: Path, tokenizers: dict[str, str]) -> local.LocalSetup:
    """A policy with quantised weights and a draft; `tokenizers` has the folders that exist, and their models."""
    for folder, model in tokenizers.items():
        (tmp_path / folder).mkdir(parents=True)
        content = (EXAMPLES / "models" / "chat" / "tokenizer.json").read_text()
        (tmp_path / folder / "tokenizer.json").write_text(content.replace(START, model))
    (tmp_path / "policy.yaml").write_text(HEAD + CHEAP)
    (tmp_path / "variants.yaml").write_text("---".join((VARIANT, QUANTIZED, DRAFT)))
    claims = {"models": tmp_path, "made": tmp_path / "made"}
    return local.load([tmp_path], claims, None, RuntimeSettings())


def test_quantised_weights_and_a_draft_from_files(tmp_path: Path) -> None:
    setup = load_cheap(tmp_path, {"chat": START, "made/small": START, "tiny": START})
    (model,) = setup.settings.models
    assert model.quantized is not None
    assert model.draft is not None
    assert (model.quantized.name, model.quantized.path) == ("small", str(tmp_path / "made" / "small"))
    assert (model.draft.path, model.draft.device) == (str(tmp_path / "tiny"), "CPU")
    assert model.full_weights == "Swap"
    assert setup.config.current.stable.speculative is not None
    (tmp_path / "policy.yaml").write_text(HEAD + CHEAP.replace("Swap", "Resident"))
    setup.config.poll()
    assert "fullWeights needs a restart" in setup.config.error


def test_a_draft_with_another_tokenizer_is_left_out(tmp_path: Path) -> None:
    setup = load_cheap(tmp_path, {"chat": START, "made/small": START, "tiny": "<|other|>"})
    assert setup.settings.models[0].draft is None
    assert setup.warnings == ("Speculative is off: the tokenizer of the draft tiny isn't that of chat",)
    assert setup.config.current.stable.speculative is None
    (tmp_path / "policy.yaml").write_text(HEAD + CHEAP.replace("{gen", "{rollbackLevel: 2, gen"))
    setup.config.poll()
    assert setup.config.current.stable.active_modes == ("Quantized",)


def test_quantised_weights_that_nobody_prepared_are_left_out(tmp_path: Path) -> None:
    setup = load_cheap(tmp_path, {"chat": START, "tiny": START})
    assert setup.settings.models[0].quantized is None
    assert setup.settings.models[0].draft is not None
    (warning,) = setup.warnings
    assert warning.startswith("Quantized is off: small isn't prepared here: ")
    assert setup.config.current.stable.active_modes == ("Speculative", "CompressedStreaming")


def test_quantised_weights_of_another_model_cant_be_served(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="different tokenizers"):
        load_cheap(tmp_path, {"chat": START, "made/small": "<|other|>", "tiny": START})


CLASSIFIER = """
apiVersion: sixfold.dev/v1alpha1
kind: ModelVariant
metadata: {name: intent}
spec: {task: Classification, source: {uri: pvc://models/intent}}
"""
CLASSIFIES = "spec: {classification: {variantRef: {name: intent}}}\n"
EXITS_AND_TASKS = CLASSIFIES.replace(
    "{name: intent}}}",
    "{name: intent}, earlyExit: {sanitize: {}}, subgraphs: {tasks: [{name: ner}, {name: pos, pinned: true}]}}}",
)


def load_classifier(tmp_path: Path, spec: str, *files: str) -> local.LocalSetup:
    (tmp_path / "intent" / "slices").mkdir(parents=True)
    for file in files:
        (tmp_path / "intent" / file).write_bytes(b"")
    (tmp_path / "policy.yaml").write_text(HEAD + spec)
    (tmp_path / "variants.yaml").write_text(CLASSIFIER)
    return local.load([tmp_path], {"models": tmp_path}, None, RuntimeSettings())


def test_exits_and_tasks_from_files(tmp_path: Path) -> None:
    files = ("exits.safetensors", "slices/ner.safetensors", "slices/pos.safetensors")
    setup = load_classifier(tmp_path, EXITS_AND_TASKS, *files)
    assert setup.warnings == ()
    stable = setup.config.current.stable
    assert stable.early_exit is not None and stable.early_exit.sanitize is not None
    assert stable.classification_subgraphs is not None
    assert [(task.name, task.pinned) for task in stable.classification_subgraphs.tasks] == [
        ("ner", False),
        ("pos", True),
    ]
    (tmp_path / "policy.yaml").write_text(HEAD + EXITS_AND_TASKS.replace("{sanitize: {}}", "{rule: Quantile}"))
    setup.config.poll()
    changed = setup.config.current.stable.early_exit
    assert changed is not None and changed.rule == "Quantile"


def test_exits_and_tasks_that_nobody_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = load_classifier(tmp_path, EXITS_AND_TASKS, "slices/pos.safetensors")
    exits, task = setup.warnings
    assert exits.startswith("EarlyExit is off: intent has no exit heads here: ")
    assert exits.endswith("intent/exits.safetensors is missing (`sixfold prepare --exit-heads` makes it)")
    assert task.startswith("the task ner of intent can't be served: ")
    assert "slices/ner.safetensors is missing (`sixfold prepare slice` makes it)" in task
    stable = setup.config.current.stable
    assert stable.early_exit is None
    assert stable.classification_subgraphs is not None, "the task that is there is served"
    (tmp_path / "policy.yaml").write_text(HEAD + EXITS_AND_TASKS.replace("name: ner", "name: topic"))
    setup.config.poll()
    assert "the task topic of intent can't be served" in caplog.text
    assert "the task ner" not in caplog.text, "that was told before"


def test_exits_that_are_asked_for_later_and_nobody_prepared(tmp_path: Path) -> None:
    setup = load_classifier(tmp_path, CLASSIFIES)
    assert setup.warnings == ()
    (tmp_path / "policy.yaml").write_text(HEAD + EXITS_AND_TASKS)
    setup.config.poll()
    assert setup.config.current.stable.early_exit is None


def test_what_labels_tokens_is_a_classifier(tmp_path: Path) -> None:
    (tmp_path / "intent").mkdir()
    (tmp_path / "policy.yaml").write_text(HEAD + CLASSIFIES)
    (tmp_path / "variants.yaml").write_text(CLASSIFIER.replace("Classification", "TokenClassification"))
    (model,) = local.load([tmp_path], {"models": tmp_path}, None, RuntimeSettings()).settings.models
    assert model.task == "TokenClassification"


def test_variants_that_are_each_others_source(tmp_path: Path) -> None:
    source = "source: {uri: pvc://models/chat}"
    two = VARIANT.replace(source, "source: {variantRef: {name: other}}")
    (tmp_path / "files.yaml").write_text(
        "---\n".join(
            (
                HEAD + SPEC,
                two,
                VARIANT.replace("name: chat", "name: other").replace(source, "source: {variantRef: {name: chat}}"),
            )
        )
    )
    with pytest.raises(ManifestError, match="each other as their source"):
        local.load([tmp_path], {"models": tmp_path}, None, RuntimeSettings())


def test_one_process_has_the_whole_rate_limit(policy_file: Path) -> None:
    gateway = "gateway: {replicas: 4, rateLimit: {requestsPerSecond: 8, burst: 8}, apiKeysSecretRef: {name: k}}"
    policy_file.write_text(HEAD + SPEC.replace("{gen", "{" + gateway + ", gen"))
    setup = load(policy_file)
    limit = setup.config.current.stable.rate_limit
    assert limit is not None
    assert (limit.requests_per_second, limit.burst) == (8, 8)
    assert "--api-keys" in setup.warnings[0]


def test_explain_tells_who_set_what() -> None:
    answer = CliRunner().invoke(app, ["explain", "policy", "-f", str(EXAMPLES), "--level", "2", "-o", "json"])
    assert answer.exit_code == 0
    explained = json.loads(answer.stdout)
    assert explained["levels"] == {"ceiling": 3, "target": 2}
    rows = {row["path"]: row for row in explained["provenance"]}
    assert (rows["/rollbackLevel"]["value"], rows["/rollbackLevel"]["setBy"]) == ("2", "Level")
    assert rows["/gateway/rateLimit/burst"]["setBy"] == "Spec"
    assert rows["/streaming/level"]["setBy"] == "Default"
    below = {"name": "CompressedStreaming", "state": "BelowLevel", "reason": "on from level 3; the level is 2"}
    assert below in explained["modes"]
    table = CliRunner().invoke(app, ["explain", "policy", "assistant", "-f", str(EXAMPLES)])
    assert table.exit_code == 0
    assert "CompressedStreaming" in table.stdout


def test_explain_prints_what_the_user_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are no markup."""
    policy = """
apiVersion: sixfold.dev/v1alpha1
kind: InferencePolicy
metadata: {name: labels}
spec:
  generation: {variantRef: {name: chat}}
  classification:
    variantRef: {name: mood}
    earlyExit: {sanitize: {keep: 'a-z\\s'}}
    subgraphs: {tasks: [{name: ner, pinned: true}]}
    escalate: {belowConfidence: "0.5", promptTemplate: "[red]Is this [/red]{labels}? {text}"}
"""
    (tmp_path / "policy.yaml").write_text(policy)
    monkeypatch.setenv("COLUMNS", "200")
    table = CliRunner().invoke(app, ["explain", "policy", "-f", str(tmp_path), "--level", "2"])
    assert table.exit_code == 0, table.output
    for words in ("[red]Is this [/red]{labels}? {text}", "ner (pinned)", "all in memory", "earlyExit"):
        assert words in table.stdout
    full = CliRunner().invoke(app, ["explain", "policy", "-f", str(tmp_path)])
    assert "a-z\\s" in full.stdout
    assert "the variant's" in full.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "policy", "-f", "missing.yaml"], "missing.yaml: No such file"),
        (["explain", "policy", "nobody", "-f", str(EXAMPLES)], "no InferencePolicy nobody"),
        (["explain", "policy"], "give the policy's name"),
        (["explain", "policy", "x", "-n", "y"], "set KUBECONFIG"),
        (["serve"], "say --role"),
        (["serve", "-f", str(EXAMPLES), "--claim", "models"], "expected CLAIM=FOLDER"),
        (["serve", "-f", str(EXAMPLES)], "--claim models=FOLDER"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent/kubeconfig")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(logging.root, "handlers", [])  # `serve` sets up its own, on the stdout of the runner
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code != 0
    assert said in answer.output
    assert "Traceback" not in answer.output


def test_the_command_line_doesnt_load_torch() -> None:
    code = (
        "import sys; from sixfold_runtime.cli import app; import sixfold_runtime.explain, sixfold_runtime.gateway.app;"
        "import sixfold_runtime.local;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
