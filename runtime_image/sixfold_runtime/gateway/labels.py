"""The answer of /v1/classify."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sixfold_runtime.engine.protocol import LabelScore


class LabelledWord(msgspec.Struct, frozen=True):
    """A word of a text whose tokens were labelled."""

    text: str
    start: Annotated[int, Meta(description="Offset of its first character in the text as it was sent.")]
    end: Annotated[int, Meta(description="Offset behind its last character.")]
    label: Annotated[str, Meta(description="Of its first token.")]
    score: float


class EscalationError(msgspec.Struct, frozen=True):
    """Why the generating model gave no answer."""

    code: str
    message: str


class LabelledText(msgspec.Struct, kw_only=True):
    """One text's labels."""

    index: Annotated[int, Meta(description="Of the text in the request.")]
    task: Annotated[str | None, Meta(description="The task slice; null is the model's own head.")]
    label: Annotated[str | UnsetType, Meta(description="The best one; absent where tokens are labelled.")] = UNSET
    score: Annotated[float | UnsetType, Meta(description="The classifier's probability of `label`.")] = UNSET
    scores: Annotated[
        list[LabelScore] | UnsetType, Meta(description="The `top_k` best labels, or all, best first.")
    ] = UNSET
    tokens: Annotated[
        list[LabelledWord] | UnsetType, Meta(description="Where tokens are labelled: the words of the text.")
    ] = UNSET
    layers: Annotated[
        int | None, Meta(description="Layers that the text ran through; null where the model runs as a whole.")
    ] = None
    exited: Annotated[
        bool, Meta(description="Whether it left after `layers` layers, before the last one, this sure: `score`.")
    ] = False
    sanitized: Annotated[
        bool, Meta(description="Whether characters that tell the classifier nothing were taken out before.")
    ] = False
    escalated: Annotated[
        bool | UnsetType, Meta(description="Whether the generating model answered; absent where nothing is escalated.")
    ] = UNSET
    label_source: Annotated[
        str | UnsetType, Meta(description="generation where `label` is what `answer` names, else classification.")
    ] = UNSET
    answer: Annotated[str | UnsetType, Meta(description="What the generating model said: label and reasons.")] = UNSET
    escalation_error: Annotated[
        EscalationError | UnsetType, Meta(description="Why there is no `answer` although no label was sure enough.")
    ] = UNSET


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens that were read and generated, escalated texts included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ClassifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Labels of the texts of a request, in their order."""

    id: str
    object: str = "classification"
    model: str
    task: Annotated[str | None, Meta(description="The task slice that answered; null is the model's own head.")]
    data: list[LabelledText]
    usage: TokenUsage
