"""JSON merge patches (RFC 7396): applying one, and whether one still changes anything. Pure."""

from __future__ import annotations

from typing import Any


def merged(document: Any, patch: Any) -> Any:
    """A JSON document with a merge patch applied (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def contains(document: Any, patch: Any) -> bool:
    """Whether a merge patch would change nothing any more."""
    if not isinstance(patch, dict):
        return bool(document == patch)
    if not isinstance(document, dict):
        return False
    return all(
        key not in document if value is None else key in document and contains(document[key], value)
        for key, value in patch.items()
    )
