"""ModelVariant -> its preparation Job. Pure."""

from __future__ import annotations

from sixfold_api.names import CLAIMS_DIRECTORY, COMPONENT_LABEL, CREDENTIALS_DIRECTORY, PREPARE, VARIANT_LABEL
from sixfold_api.scalars import duration_seconds
from sixfold_api.variant import CLAIM_SCHEME, PERMANENT_FAILURE_EXIT_CODE, ModelVariantSpec
from sixfold_operator.builders.common import (
    MANAGED_BY,
    MANAGED_BY_LABEL,
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


def claim_and_path(name: str, spec: ModelVariantSpec) -> tuple[str, str]:
    """The claim that holds the weights of variant `name` once it is prepared, and the folder inside it."""
    if spec.artifact is not None:
        return spec.artifact.claim_name, name
    claim, _, path = (spec.source.uri or "").removeprefix(CLAIM_SCHEME).partition("/")
    return claim, path


def job_name(variant: Manifest, spec: ModelVariantSpec) -> str:
    """A name that changes with the spec and with the variant itself, so that a Job's answer is never another's."""
    identity = [variant["metadata"]["uid"], spec.to_dict()]
    return f"{variant['metadata']['name']}-{PREPARE}-{digest(identity, 8)}"


def preparation_job(variant: Manifest, spec: ModelVariantSpec, settings: OperatorSettings) -> Manifest:
    """The Job that fetches (hf://) or only verifies (pvc://) the weights.

    It is never changed, and stays until the variant goes: its pod's termination message is the answer.
    """
    name = variant["metadata"]["name"]
    claim, path = claim_and_path(name, spec)
    fetches = spec.artifact is not None
    pod = spec.preparation.pod
    mounts = claim_mounts([claim], read_only=not fetches)
    if spec.credentials_secret_ref is not None:
        secret = {"secret": {"secretName": spec.credentials_secret_ref.name}}
        mounts.append(Mount("credentials", secret, CREDENTIALS_DIRECTORY))
    main = container(settings, PREPARE, pod, mounts)
    main["command"] = ["sixfold"]
    main["args"] = ["prepare", "--source", spec.source.uri or "", "--task", spec.task.value, "--claims", CLAIMS_DIRECTORY]
    if fetches:
        main["args"] += ["--artifact-claim", claim, "--artifact-path", path]
    main["env"] = [{"name": "HOME", "value": "/tmp"}]
    if fetches and settings.hub_endpoint:
        main["env"].append({"name": "HF_ENDPOINT", "value": settings.hub_endpoint})
    template = pod_spec(main, pod, mounts)
    template["restartPolicy"] = "Never"
    if fetches:
        template["securityContext"] |= {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    labels = {VARIANT_LABEL: name, COMPONENT_LABEL: PREPARE}
    manifest = child(variant, "batch/v1", "Job", job_name(variant, spec), labels)
    manifest["spec"] = {
        "backoffLimit": TRIES - 1,
        "podFailurePolicy": {"rules": [_NO_SECOND_TRY]},
        "activeDeadlineSeconds": max(1, round(duration_seconds(spec.preparation.deadline))),
        "template": {"metadata": {"labels": {MANAGED_BY_LABEL: MANAGED_BY, **labels}}, "spec": template},
    }
    return manifest
