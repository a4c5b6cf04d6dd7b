"""Task slices: what a multi-task variant is made of, and which of them a policy offers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import ApiModel, Rule, StatusModel
from sixfold_api.precision import CLAIM_FILE_PATTERN, TextSource
from sixfold_api.scalars import OurName, Quantity, Task, Unquoted

MAX_TASKS = 32
DEFAULT_ADAPTER_WIDTH, DEFAULT_ADAPTER_LAYERS = 64, 8
"""The source's 8 x 64: a bottleneck of 64 in each of the last 8 layers, or in all of a shallower trunk."""
ADDRESS = Annotated[str, StringConstraints(pattern=CLAIM_FILE_PATTERN, max_length=512)]


class AdapterShape(ApiModel):
    """Bottleneck adapters (Houlsby et al., arXiv 1902.00751) behind the feed-forward part of the last layers."""

    width: Annotated[int, Field(ge=1, le=4096), Unquoted] = DEFAULT_ADAPTER_WIDTH
    """Of the bottleneck."""
    layers: Annotated[int, Field(ge=1, le=256), Unquoted] = DEFAULT_ADAPTER_LAYERS
    """How many of the last layers have one; at most all of them."""


class SliceSpec(ApiModel):
    """What one task has of its own. Without `checkpoint` and `training` it lies in the source's folder already, as
    `sixfold prepare slice` writes it there."""

    name: OurName
    """The task, as X-Task names it."""
    task: Task | None = None
    """Absent means the variant's; a classifier's slice may have TokenClassification."""
    checkpoint: ADDRESS | None = None
    """pvc://claim/path of a model that was tuned for the task from the same trunk: what differs is cut out of it."""
    training: TextSource | None = None
    """Labelled text that adapters and a head learn from, over the frozen trunk."""
    adapter: AdapterShape | None = None
    """Of the adapters that are trained; absent means 8 x 64."""

    rules = (
        Rule(
            "!(has(self.checkpoint) && has(self.training))",
            "a slice comes from checkpoint or from training, not both",
            lambda s: s.checkpoint is None or s.training is None,
        ),
        Rule(
            "!has(self.adapter) || has(self.training)",
            "adapter is for slices that are trained: add training or remove it",
            lambda s: s.adapter is None or s.training is not None,
        ),
    )

    @property
    def is_made(self) -> bool:
        """Whether the preparation makes it."""
        return self.checkpoint is not None or self.training is not None


class SliceReport(StatusModel):
    """A slice that was prepared."""

    name: OurName
    """The task."""
    task: Task
    """Generation, Classification or TokenClassification."""
    size_bytes: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
    """Bytes of its tensors."""


class SubgraphTask(ApiModel):
    """A task that the policy offers."""

    name: OurName
    """Of a slice of the variant; clients name it in the header X-Task."""
    pinned: Annotated[bool, Field(strict=True)] = False
    """Hot: its slice is loaded at the start and never unloaded."""


class SubgraphsSpec(ApiModel):
    """Task slices of the variant, on demand from level 3. Below it all of them stay in memory."""

    tasks: Annotated[
        list[SubgraphTask],
        Field(
            min_length=1,
            max_length=MAX_TASKS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ]
    """Tasks that clients may ask for."""
    cache_size: Quantity | None = None
    """Bytes of slices in memory, pinned ones included; those not used for longest go first. Absent means no limit."""

    rules = (
        Rule(
            "self.tasks.all(t, self.tasks.exists_one(u, u.name == t.name))",
            "each task may stand there once",
            lambda s: len({task.name for task in s.tasks}) == len(s.tasks),
        ),
    )
