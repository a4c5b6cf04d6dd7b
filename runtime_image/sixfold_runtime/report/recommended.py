"""Proposals -> YAML that can be applied: a new policy, or a merge patch of one; each setting says why. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from sixfold_api.merge_patch import contains, merged
from sixfold_api.modes import Mode
from sixfold_api.names import API_VERSION, POLICY_KIND, POLICY_PLURAL
from sixfold_api.policy import InferencePolicySpec
from sixfold_runtime.config import describe
from sixfold_runtime.report.recommend import Proposal
from sixfold_runtime.report.served import Served

Path = tuple[str, ...]
_WIDTH = 110


def new_policy(name: str, served: Served, found: Sequence[Proposal]) -> str:
    """A complete InferencePolicy as YAML."""
    spec: dict[str, Any] = {}
    for part, variant in (("generation", served.generation), ("classification", served.classification)):
        if variant is not None:
            spec[part] = {"variantRef": {"name": variant}}
    taken, whys, left = _settled(spec, found)
    document = {"apiVersion": API_VERSION, "kind": POLICY_KIND, "metadata": {"name": name}, "spec": merged(spec, taken)}
    return _rendered(document, whys, left)


def patch_of(name: str, namespace: str, spec: InferencePolicySpec, found: Sequence[Proposal]) -> str:
    """A merge patch of an existing policy as YAML; it leaves alone what the policy has already."""
    written = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    fresh = [proposal for proposal in found if not _is_there(spec, proposal)]
    taken, whys, left = _settled(written, fresh)
    if not taken:
        return _rendered({}, {}, ["nothing to change in this policy", *left])
    how = f"kubectl patch {POLICY_PLURAL} {name} -n {namespace} --type merge --patch-file FILE"
    low = [proposal for proposal in fresh if proposal.patch is not None and proposal.level > spec.rollback_level]
    ceiling = [
        f"{proposal.what} runs from level {proposal.level}; rollbackLevel of this policy is {spec.rollback_level}"
        for proposal in low
    ]
    return _rendered({"spec": taken}, whys, [how, *ceiling, *left])


def _is_there(spec: InferencePolicySpec, proposal: Proposal) -> bool:
    """Whether the policy has its blocks already: what they hold was somebody's choice, and tuning's to change."""
    if proposal.mode is Mode.SPECULATIVE:
        return spec.generation is not None and spec.generation.speculative is not None
    return proposal.patch is not None and contains(spec.to_dict(), proposal.patch)


def _settled(spec: dict[str, Any], found: Iterable[Proposal]) -> tuple[dict[str, Any], dict[Path, str], list[str]]:
    """The patches that the schema takes as one patch, why each place of it, and what is left out for which reason."""
    taken: dict[str, Any] = {}
    whys: dict[Path, str] = {}
    left: list[str] = []
    for proposal in found:
        if proposal.patch is None:
            left.append(f"not in it: {proposal.what}. {proposal.why}; {proposal.needs}")
            continue
        together = merged(taken, proposal.patch)
        try:
            InferencePolicySpec.model_validate(merged(spec, together))
        except ValidationError as error:
            left.append(f"not in it: {proposal.what}. {proposal.why}; but {describe(error)}")
            continue
        taken = together
        whys |= {("spec", *place): f"{proposal.what}: {proposal.why}" for place in _places(proposal.patch)}
    return taken, whys, left


def _places(patch: dict[str, Any]) -> Iterator[Path]:
    """Where a patch sets something: blocks, or values of the spec's parts."""
    for part, block in patch.items():
        if isinstance(block, dict) and block:
            yield from ((part, name) for name in block)
        else:
            yield (part,)


def _rendered(document: dict[str, Any], whys: Mapping[Path, str], head: Iterable[str]) -> str:
    """YAML with comments: `head` before all of it, `whys` each above the line of its key."""
    lines = [line for text in head for line in _comment(text, "")]
    path: list[str] = []
    for line in yaml.safe_dump(document, sort_keys=False).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        key = line.strip().partition(":")[0]
        if not key.startswith("- "):
            path = [*path[: len(indent) // 2], key]
            lines += _comment(whys.get(tuple(path), ""), indent)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False)
