"""spec.classification: how labels are made cheaply, and what happens to texts that no label is sure for."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from sixfold_api.base import ApiModel, Rule
from sixfold_api.scalars import Fraction, Unquoted

DEFAULT_KEPT_CHARACTERS = r"a-zA-Z0-9\u4e00-\u9fff\s.,!?;"
TEXT_PLACE = "{text}"

_PLAIN = r"[^\[\]^\\\n-]"
"""A character that stands for itself."""
_CODE = r"\\u[0-9a-fA-F]{4}"
KEPT_CHARACTERS_PATTERN = rf"^({_PLAIN}-{_PLAIN}|{_CODE}-{_CODE}|{_CODE}|\\[sdwtnr.\\\[\]^-]|{_PLAIN})+$"
"""Ranges, \\uXXXX, escapes and characters: a class of characters that can't fail to compile but for a range
that runs backwards."""


class ExitRule(StrEnum):
    CALIBRATED = "Calibrated"
    QUANTILE = "Quantile"
    FIXED = "Fixed"


class OtherScripts(StrEnum):
    KEEP = "Keep"
    REMOVE = "Remove"


KeptCharacters = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=KEPT_CHARACTERS_PATTERN)]


def not_kept(keep: str) -> re.Pattern[str]:
    """Matches runs of the characters that `keep` doesn't have. Raises re.error."""
    escaped = re.sub("[&|~]", r"\\\g<0>", keep)  # two of them will be set operations one day
    return re.compile(f"[^{escaped}]+")


def _compiles(keep: str) -> bool:
    try:
        not_kept(keep)
    except re.error:
        return False
    return True


KEPT_CHARACTERS_RULES = (
    Rule(
        f"!has(self.keep) || (self.keep.findAll(r'{_PLAIN}-{_PLAIN}').all(r, r.substring(0, 1) <= r.substring(2, 3))"
        f" && self.keep.findAll(r'{_CODE}-{_CODE}').all(r, r.substring(2, 6).lowerAscii()"
        " <= r.substring(9, 13).lowerAscii()))",
        "keep has a range that runs backwards, such as z-a",
        lambda s: _compiles(s.keep),
    ),
)


class SanitizeSpec(ApiModel):
    """Removes characters that tell a classifier nothing. A text of which nothing would be left stays as it is."""

    keep: KeptCharacters = DEFAULT_KEPT_CHARACTERS
    r"""Characters that stay, as in the brackets of a regular expression: characters, ranges, \uXXXX, \s, \d, \w, \t,
    and \- \\ \[ \] \^ for themselves. Absent means ASCII letters and digits, Chinese characters, white space and
    .,!?;"""
    other_scripts: OtherScripts = OtherScripts.KEEP
    """Keep leaves a text alone that has letters outside of `keep`: they would be lost. Remove takes them too."""

    rules = KEPT_CHARACTERS_RULES


class EarlyExitSpec(ApiModel):
    """Texts leave the classifier as soon as a head is sure, on from level 3. The variant needs exitHeads."""

    rule: ExitRule = ExitRule.CALIBRATED
    """Calibrated bounds the disagreement with the full model. Quantile exits at the 90th percentile of the
    confidences. Fixed takes `threshold`. The last two promise nothing about how often they are wrong."""
    threshold: Fraction | None = None
    """Rule Fixed: least confidence of an exit."""
    max_disagreement: Fraction | None = None
    """Rule Calibrated: most labels, as a share, that may differ from the full model's; absent means the variant's."""
    length_relaxation: Fraction | None = None
    """Taken from a threshold, times the natural logarithm of the text's tokens; absent means the variant's."""
    sanitize: SanitizeSpec | None = None
    """Absent means that texts are read as they come."""

    rules = (
        Rule(
            "has(self.threshold) == (has(self.rule) && self.rule == 'Fixed')",
            "threshold is needed for rule: Fixed, and only there",
            lambda e: (e.threshold is not None) == (e.rule is ExitRule.FIXED),
        ),
        Rule(
            "!has(self.maxDisagreement) || !has(self.rule) || self.rule == 'Calibrated'",
            "maxDisagreement is for rule: Calibrated; remove it",
            lambda e: e.max_disagreement is None or e.rule is ExitRule.CALIBRATED,
        ),
    )


class EscalateSpec(ApiModel):
    """Texts that no label is sure enough for go to the policy's generation: the answer gives label and reasons."""

    below_confidence: Fraction
    """A text whose best label scores less is escalated."""
    prompt_template: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """What the generating model is asked: {text} stands for the text, {labels} for the labels it may choose from."""
    max_tokens: Annotated[int, Field(ge=1, le=4096), Unquoted] = 128
    """Longest answer."""

    rules = (
        Rule(
            "self.promptTemplate.contains('{text}')",
            "promptTemplate must contain {text}, where the text goes",
            lambda e: TEXT_PLACE in e.prompt_template,
        ),
    )
