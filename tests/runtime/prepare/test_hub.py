"""`prepare` from a hub: a real server on the loopback address, real downloads by huggingface_hub."""

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import transformers

ARTIFACT = ("--artifact-claim", "models", "--artifact-path", "chat")


@pytest.fixture
def fetch(hub, run_prepare):
    """Run `prepare` for a repository of the test's hub."""

    def run(repository="acme/chat", commit=hub.COMMIT, task="Generation", endpoint=hub.endpoint):
        return run_prepare(f"hf://{repository}@{commit}", task, "--endpoint", endpoint, *ARTIFACT)

    return run


@pytest.fixture
def impatient(monkeypatch):
    """The hub's client waits between its attempts; a test needn't."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def repository(hub, chat_model, tmp_path):
    """A copy of the hub's model that a test may change."""
    folder = tmp_path / "repository"
    shutil.copytree(chat_model, folder)
    hub.repositories["acme/chat"] = folder
    return folder


def test_fetched_and_verified(hub, fetch, claims):
    facts = fetch().facts
    assert facts.architecture == "LlamaForCausalLM"
    folder = claims / "models" / "chat"
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["chat"]


def test_only_files_of_the_model_are_fetched(hub, repository, fetch):
    for name in ("pytorch_model.bin", "modeling_evil.py", "README.md", "training_args.bin", "model.fp16.safetensors"):
        (repository / name).write_bytes(b"x")
    assert fetch().exit_code == 0
    assert set(hub.downloads) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_second_run_fetches_nothing(hub, fetch):
    first = fetch().facts
    hub.downloads.clear()
    hub.broken_status = 500
    assert fetch().facts == first
    assert hub.downloads == []


def test_an_interrupted_fetch_goes_on_where_it_stopped(hub, fetch, impatient):
    hub.served_bytes["tokenizer.json"] = b"short"
    hub.listed_sizes["tokenizer.json"] = 6
    assert fetch().exit_code == 1
    assert "model.safetensors" in hub.downloads
    hub.served_bytes.clear()
    hub.listed_sizes.clear()
    hub.downloads.clear()
    assert fetch().exit_code == 0
    assert "model.safetensors" not in hub.downloads
    assert "tokenizer.json" in hub.downloads


def test_another_commit_replaces_the_folder(hub, fetch, repository, claims):
    first = fetch().facts
    folder = claims / "models" / "chat"
    manifest = json.loads((folder / ".sixfold-source.json").read_text())
    (folder / ".sixfold-source.json").write_text(json.dumps(manifest | {"uri": "an older one"}))
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    second = fetch().facts
    assert (first.context_tokens, second.context_tokens) == (128, 64)
    assert [path.name for path in folder.parent.iterdir()] == ["chat"]


def test_weights_that_changed_after_the_fetch_are_fetched_anew(hub, fetch, claims):
    first = fetch().facts
    weights = claims / "models" / "chat" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    failure = fetch().transient_failure
    assert failure.reason == "CorruptWeights"
    assert "model.safetensors is not what the hub published" in failure.message
    assert fetch().facts == first


def test_sharded_weights_are_fetched_whole(hub, fetch, repository):
    model = transformers.AutoModelForCausalLM.from_pretrained(repository)
    (repository / "model.safetensors").unlink()
    model.save_pretrained(repository, max_shard_size="8KB")
    facts = fetch().facts
    shards = {path.name for path in repository.glob("model-*.safetensors")}
    assert len(shards) > 1
    assert {*shards, "model.safetensors.index.json"} <= set(hub.downloads)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "repository_name, commit, words",
    [("acme/none", "0123456789abcdef0123456789abcdef01234567", "404"), ("acme/chat", "f" * 40, "no such commit")],
)
def test_not_there(fetch, claims, repository_name, commit, words):
    failure = fetch(repository_name, commit).failure
    assert failure.reason == "SourceNotFound"
    assert words in failure.message
    assert list((claims / "models").iterdir()) == []


def test_a_token_opens_a_private_repository(hub, fetch, tmp_path):
    hub.token = "hf_sesame"
    failure = fetch().failure
    assert failure.reason == "Unauthorized"
    assert "set credentialsSecretRef" in failure.message
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "token").write_text("hf_wrong\n")
    run = fetch()
    assert run.failure.reason == "Unauthorized"
    assert "gives no access" in run.failure.message
    assert "hf_wrong" not in run.log + run.raw.decode()
    (credentials / "token").write_text("hf_sesame\n")
    assert fetch().exit_code == 0


@pytest.mark.parametrize("status", [500, 503])
def test_a_broken_hub(hub, fetch, impatient, status):
    hub.broken_status = status
    failure = fetch().transient_failure
    assert failure.reason == "SourceUnreachable"
    assert f"answers {status}" in failure.message


def test_a_hub_that_does_not_answer(fetch, impatient):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    failure = fetch(endpoint=f"http://127.0.0.1:{port}").transient_failure
    assert failure.reason == "SourceUnreachable"
    assert "can't be reached" in failure.message


def test_a_file_that_arrives_cut_off(hub, fetch, repository, claims, impatient):
    whole = (repository / "model.safetensors").read_bytes()
    hub.served_bytes["model.safetensors"] = whole[:-64]
    failure = fetch().transient_failure
    assert failure.reason == "CorruptWeights"
    assert f"model.safetensors arrived with {len(whole) - 64} of {len(whole)} bytes" in failure.message
    assert not (claims / "models" / "chat").exists()
    hub.served_bytes.clear()
    assert fetch().exit_code == 0


def test_a_repository_of_pickles_is_refused_before_anything_is_fetched(hub, fetch, repository):
    (repository / "model.safetensors").rename(repository / "pytorch_model.bin")
    failure = fetch().failure
    assert failure.reason == "UnsafeFormat"
    assert hub.downloads == []


def test_a_model_larger_than_the_claim(hub, fetch):
    hub.listed_sizes["model.safetensors"] = 10**18
    failure = fetch().transient_failure
    assert failure.reason == "DiskFull"
    assert "use a larger claim" in failure.message
    assert hub.downloads == []


def test_a_disk_that_runs_full(hub, fetch, repository, claims):
    """The listing says less than what comes, as when something else fills the claim during the fetch."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(claims / "models")], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    try:
        hub.listed_sizes["model.safetensors"] = 10
        hub.served_bytes["model.safetensors"] = bytes(256 * 1024)
        failure = fetch().transient_failure
        assert failure.reason == "DiskFull"
        assert "full while writing" in failure.message
    finally:
        subprocess.run(["umount", str(claims / "models")], check=True)


def test_a_claim_that_cannot_be_written_to(fetch, claims):
    shutil.rmtree(claims / "models")
    Path(claims / "models").symlink_to("/proc/self")
    failure = fetch().failure
    assert failure.reason == "ClaimNotWritable"


def test_the_artifact_must_be_named(hub, run_prepare):
    failure = run_prepare(f"hf://acme/chat@{hub.COMMIT}", "Generation", "--endpoint", hub.endpoint).transient_failure
    assert "--artifact-claim" in failure.message
