"""Fields of OpenAI's API that this server doesn't have.

One is accepted while its value changes nothing, and refused with its name otherwise: no request is answered as if a
setting of it had not been there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sixfold_runtime.gateway.errors import bad_request

_ANY = object()
HARMLESS: Mapping[str, tuple[Any, ...] | object] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "metadata": _ANY,
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "parallel_tool_calls": _ANY,
    "prediction": _ANY,
    "prompt_cache_key": _ANY,
    "prompt_cache_retention": _ANY,
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "safety_identifier": _ANY,
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "user": _ANY,
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
HARMLESS_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


def check_extra(extra: Mapping[str, Any] | None, harmless: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what would be ignored silently."""
    for name, value in (extra or {}).items():
        values = harmless.get(name)
        if values is None:
            raise bad_request(f"unknown field: {prefix}{name}", prefix + name, "unknown_parameter")
        # 0.0 is as good as 0, but False isn't.
        if values is not _ANY and not any(
            value == other and isinstance(value, bool) is isinstance(other, bool) for other in values
        ):
            raise bad_request(
                f"{prefix}{name} is not supported with this value; leave it out", prefix + name, "unsupported_parameter"
            )
