"""ModelVariant -> its preparation Job. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sixfold_api.base import ApiModel
from sixfold_api.names import CLAIMS_DIRECTORY, COMPONENT_LABEL, CREDENTIALS_DIRECTORY, PREPARE, VARIANT_LABEL
from sixfold_api.scalars import duration_seconds
from sixfold_api.variant import CLAIM_SCHEME, PERMANENT_FAILURE_EXIT_CODE, ModelVariantSpec
from sixfold_operator.builders.common import (
    USER_ID,
    Manifest,
    Mount,
    child,
    claim_mounts,
    container,
    digest,
    pod_spec,
)
from sixfold_operator.settings import OperatorSettings

TRIES = 3
_NO_SECOND_TRY = {
    "action": "FailJob",
    "onExitCodes": {"containerName": PREPARE, "operator": "In", "values": [PERMANENT_FAILURE_EXIT_CODE]},
}


@dataclass(frozen=True)
class Inputs:
    """Addresses that are known only once the variants are prepared that a variant refers to."""

    source: str
    """hf:// or pvc:// of the weights that the preparation begins with."""
    target: str = ""
    """pvc:// of the prepared target, for a draft."""


def claims(spec: ModelVariantSpec, inputs: Inputs) -> set[str]:
    """Every claim that the Job mounts."""
    uris = (inputs.source, inputs.target, *_files(spec))
    found = {_split(uri)[0] for uri in uris if uri.startswith(CLAIM_SCHEME)}
    return found if spec.artifact is None else found | {spec.artifact.claim_name}


def _files(spec: ModelVariantSpec) -> Iterator[str]:
    """Addresses of texts, adapters and checkpoints that the Job reads beside the weights."""
    heads = spec.exit_heads
    for text in (spec.calibration, spec.evaluation, spec.lora, None if heads is None else heads.training):
        if text is not None:
            yield text.uri
    for entry in spec.slices:
        if entry.training is not None:
            yield entry.training.uri
        if entry.checkpoint is not None:
            yield entry.checkpoint


def artifact_place(name: str, spec: ModelVariantSpec, source: str) -> tuple[str, str]:
    """The claim that holds the weights of variant `name` once it is prepared, and the folder inside it."""
    return _split(source) if spec.artifact is None else (spec.artifact.claim_name, name)


def job_name(variant: Manifest, spec: ModelVariantSpec) -> str:
    """A name that changes with the spec and with the variant itself, so that a Job's answer is never another's."""
    identity = [variant["metadata"]["uid"], spec.to_dict()]
    return f"{variant['metadata']['name']}-{PREPARE}-{digest(identity, 8)}"


def bare_job(variant: Manifest, spec: ModelVariantSpec) -> Manifest:
    """The Job by name and owner, without a body."""
    labels = {VARIANT_LABEL: variant["metadata"]["name"], COMPONENT_LABEL: PREPARE}
    return child(variant, "batch/v1", "Job", job_name(variant, spec), labels)


def preparation_job(variant: Manifest, spec: ModelVariantSpec, inputs: Inputs, settings: OperatorSettings) -> Manifest:
    """The Job that fetches, adapts, quantises, gives exits and slices, compares, or only verifies the weights.

    It is never changed, and stays until the variant goes: its pod's termination message is the answer.
    """
    written = set() if spec.artifact is None else {spec.artifact.claim_name}
    pod = spec.preparation.pod
    mounts = claim_mounts(claims(spec, inputs) - written) + claim_mounts(written, read_only=False)
    if spec.credentials_secret_ref is not None:
        secret = {"secret": {"secretName": spec.credentials_secret_ref.name}}
        mounts.append(Mount("credentials", secret, CREDENTIALS_DIRECTORY))
    main = container(settings, PREPARE, pod, mounts)
    main["command"] = ["sixfold"]
    main["args"] = ["prepare", *_arguments(variant["metadata"]["name"], spec, inputs)]
    main["workingDir"] = "/tmp"  # GPTQModel writes its logs to where it is started
    main["env"] = [{"name": "HOME", "value": "/tmp"}]
    if spec.source.is_hub and settings.hub_endpoint:
        main["env"].append({"name": "HF_ENDPOINT", "value": settings.hub_endpoint})
    template = pod_spec(main, pod, mounts)
    template["restartPolicy"] = "Never"
    if written:
        template["securityContext"] |= {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    manifest = bare_job(variant, spec)
    labels = manifest["metadata"]["labels"]
    manifest["spec"] = {
        "backoffLimit": TRIES - 1,
        "podFailurePolicy": {"rules": [_NO_SECOND_TRY]},
        "activeDeadlineSeconds": max(1, round(duration_seconds(spec.preparation.deadline))),
        "template": {"metadata": {"labels": labels}, "spec": template},
    }
    return manifest


def _arguments(name: str, spec: ModelVariantSpec, inputs: Inputs) -> list[str]:
    """The options of `sixfold prepare`."""
    options: dict[str, str | None] = {
        "--source": inputs.source,
        "--task": spec.task.value,
        "--claims": CLAIMS_DIRECTORY,
    }
    if spec.artifact is not None:
        claim, path = artifact_place(name, spec, inputs.source)
        options |= {"--artifact-claim": claim, "--artifact-path": path}
    if spec.quantises:
        options |= {"--precision": _json(spec.precision), "--budget": spec.budget}
    options |= {
        "--calibration": _json(spec.calibration),
        "--evaluation": _json(spec.evaluation),
        "--lora": None if spec.lora is None else spec.lora.uri,
        "--exit-heads": _json(spec.exit_heads),
        "--slices": _json(spec.slices) if spec.slices else None,
    }
    if spec.draft_for is not None:
        options |= {"--draft-for": inputs.target, "--target-name": spec.draft_for.name}
    return [word for option, value in options.items() if value is not None for word in (option, value)]


def _json(part: ApiModel | Sequence[ApiModel] | None) -> str | None:
    if part is None:
        return None
    document = part.to_dict() if isinstance(part, ApiModel) else [item.to_dict() for item in part]
    return json.dumps(document, separators=(",", ":"))


def _split(uri: str) -> tuple[str, str]:
    """Claim and path of a pvc:// address."""
    claim, _, path = uri.removeprefix(CLAIM_SCHEME).partition("/")
    return claim, path
