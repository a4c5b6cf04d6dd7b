"""Characters that tell a classifier nothing, taken out before it reads a text (SEEDS.md, row 1).

A head is easily sure of garbage, so texts are cleaned where texts may exit early. Taking out is safe by two rules: a
text is never emptied, and one in a script that would be lost is left alone unless the policy says otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from sixfold_api.classification import OtherScripts, not_kept


class SanitizeResult(StrEnum):
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    OTHER_SCRIPT = "other_script"
    """Left alone: it has letters that would be lost."""
    WOULD_BE_EMPTY = "would_be_empty"
    """Left alone: no letter or digit would be left."""


@dataclass(frozen=True)
class Sanitized:
    text: str
    result: SanitizeResult


class Sanitizer:
    """Keeps the characters of a class, in their order; nothing is put in their place.

    >>> Sanitizer(r"a-z\\s.")("so <b>good</b>… 👍")
    Sanitized(text='so bgoodb ', result=<SanitizeResult.CHANGED: 'changed'>)
    """

    def __init__(self, keep: str, other_scripts: OtherScripts = OtherScripts.KEEP) -> None:
        """
        Args:
            keep: what stands in the brackets of a regular expression.

        Raises:
            ValueError: `keep` is no such thing.
        """
        try:
            self._others = not_kept(keep)
        except re.error as error:
            raise ValueError(f"{keep!r} is no class of characters: {error}") from error
        self._other_scripts = other_scripts

    def __call__(self, text: str) -> Sanitized:
        kept = self._others.sub("", text)
        if len(kept) == len(text):
            return Sanitized(text, SanitizeResult.UNCHANGED)
        lost = "".join(self._others.findall(text))
        if self._other_scripts is OtherScripts.KEEP and any(character.isalpha() for character in lost):
            return Sanitized(text, SanitizeResult.OTHER_SCRIPT)
        if not any(character.isalnum() for character in kept):
            return Sanitized(text, SanitizeResult.WOULD_BE_EMPTY)
        return Sanitized(kept, SanitizeResult.CHANGED)
