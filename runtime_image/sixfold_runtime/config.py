"""The RuntimeConfig that a process obeys: read from the mounted ConfigMap, validated, swapped without a restart.

The kubelet replaces a mounted ConfigMap by renaming the link `..data`, which file notifications report in several
ways and drop under load. So the store polls and compares contents: whatever happened to links and inodes, it ends
up with what the file says, at most POLL_SECONDS later, for one small read from the page cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from sixfold_api.effective import effective
from sixfold_api.generation import GenerationSpec
from sixfold_api.names import CONFIG_KEY
from sixfold_api.pods import VariantRef
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import RuntimeConfig

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05

Parse = Callable[[bytes], RuntimeConfig]
Callback = Callable[[RuntimeConfig], None]


def default_config(target_level: int | None = None) -> RuntimeConfig:
    """What a policy without any setting of its own gives, as sequence 0."""
    spec = InferencePolicySpec(generation=GenerationSpec(variant_ref=VariantRef(name="default")))
    result = effective(spec, target_level)
    return RuntimeConfig(sequence=0, stable=result.config, provenance=result.provenance)


def parse_config(content: bytes) -> RuntimeConfig:
    """The RuntimeConfig in the bytes of a config.json; raises ValueError."""
    return RuntimeConfig.model_validate_json(content)


def describe(error: Exception) -> str:
    """One line for people: each field that is wrong, and why."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for problem in problems:
        field = ".".join(map(str, problem["loc"]))
        message = "unknown field" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"{field}: " * bool(field) + message.removeprefix("Value error, "))
    return "; ".join(lines)


def unknown_fields(model: BaseModel, path: str = "") -> Iterator[str]:
    """JSON pointers of the fields that this version doesn't know, wherever they are nested."""
    for name in model.model_extra or {}:
        yield f"{path}/{name}"
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        for index, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, BaseModel):
                below = f"{path}/{field.alias or name}"
                yield from unknown_fields(item, f"{below}/{index}" if isinstance(value, tuple) else below)


class ConfigStore:
    """Holds the last good configuration.

    A content that doesn't parse, or whose sequence is lower than the current one (a volume that lags behind, or a
    file put back by hand), is logged once, stands in `error`, and changes nothing.

    Attributes:
        error: why the newest content was refused; empty while the newest is in use.
        unknown_fields: JSON pointers of fields in use that this version doesn't know.
        refused: how many contents were refused so far.
    """

    def __init__(self, initial: RuntimeConfig, path: Path | None = None, parse: Parse = parse_config) -> None:
        self.error = ""
        self.unknown_fields: tuple[str, ...] = ()
        self.refused = 0
        self._current = initial
        self._path = path
        self._parse = parse
        self._content: bytes | None = b""
        self._callbacks: list[Callback] = []
        self.poll()

    @classmethod
    def fixed(cls, config: RuntimeConfig | None = None) -> Self:
        """A store that never changes; without `config`, the embedded defaults."""
        return cls(config or default_config())

    @classmethod
    def watching(cls, directory: Path | None) -> Self:
        """Follows `directory`/config.json. Until it holds a good one the level is 0: the user's ceiling is unknown."""
        if directory is None:
            return cls.fixed()
        return cls(default_config(target_level=0), directory / CONFIG_KEY)

    @property
    def current(self) -> RuntimeConfig:
        """The configuration in use; always valid."""
        return self._current

    def subscribe(self, callback: Callback) -> None:
        """Call `callback` with each new configuration, in the thread that polls."""
        self._callbacks.append(callback)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self.poll()
            except Exception:  # a fault in a subscriber must not end the following
                log.exception("a change of the configuration was not taken everywhere")

    def poll(self) -> None:
        """Look at the file now and take what is new."""
        if self._path is None:
            return
        try:
            content = self._path.read_bytes()
        except OSError as error:
            if self._content is not None:
                self._content = None
                self._refuse(f"can't read {self._path}: {error.strerror}")
            return
        if content != self._content:
            self._content = content
            self._take(content)

    def _take(self, content: bytes) -> None:
        try:
            config = self._parse(content)
        except (ValueError, RecursionError) as error:
            self._refuse(f"{self._path}: {describe(error)}")
            return
        if config.sequence < self._current.sequence:
            self._refuse(f"{self._path}: sequence {config.sequence} is older than {self._current.sequence} in use")
            return
        self.error = ""
        unknown = tuple(unknown_fields(config))
        if unknown and unknown != self.unknown_fields:
            log.warning("fields of the configuration that this version doesn't know: %s", ", ".join(unknown))
        self.unknown_fields = unknown
        self._current = config
        log.info("configuration %d in use: level %d", config.sequence, config.stable.level)
        for callback in self._callbacks:
            callback(config)

    def _refuse(self, error: str) -> None:
        self.error = error
        self.refused += 1
        log.error("configuration refused, the last good one stays in use: %s", error)
