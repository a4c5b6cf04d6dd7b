"""Tokenizers by content: fetched once from whichever engine announces them, checked, kept."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from sixfold_runtime.gateway.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Source:
    """An engine: where it is, and the name that its certificate bears if it has one."""

    url: str
    host: str


class TokenizerCache:
    """Holds each tokenizer that some engine announced. Variants of one base model share theirs."""

    def __init__(
        self,
        sources: Callable[[str], Sequence[Source]],
        on_new: Callable[[], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`sources` gives the engines that announce a digest now; `on_new` hears of each arrival."""
        self._sources = sources
        self._on_new = on_new
        self._tls = tls
        self._held: dict[str, ModelTokenizer] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}

    def get(self, sha256: str) -> ModelTokenizer | None:
        return self._held.get(sha256)

    def want(self, sha256: str) -> None:
        """Start fetching what is neither there nor on its way."""
        if sha256 not in self._held and sha256 not in self._fetches:
            self._fetches[sha256] = asyncio.create_task(self._fetch(sha256))

    async def close(self) -> None:
        tasks = list(self._fetches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, sha256: str) -> None:
        """Try the sources in turn until one works, or none announces the digest any more."""
        try:
            tries = 0
            while sources := self._sources(sha256):
                source = sources[tries % len(sources)]
                tries += 1
                try:
                    self._held[sha256] = await self._download(source, sha256)
                    self._on_new()
                    return
                except (httpx.HTTPError, msgspec.MsgspecError, ValueError) as error:
                    log.error("tokenizer of %s: %s", source.url, error or type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._fetches[sha256]

    async def _download(self, source: Source, sha256: str) -> ModelTokenizer:
        async with httpx.AsyncClient(trust_env=False, timeout=60, verify=self._tls or True) as client:
            url, name = f"{source.url}/tokenizer/{sha256}", {"sni_hostname": source.host}
            response = await client.get(url, extensions=name)
        response.raise_for_status()
        if hashlib.sha256(response.content).hexdigest() != sha256:
            raise ValueError("the content has another digest than announced")
        return await asyncio.to_thread(ModelTokenizer.from_json, response.content)
