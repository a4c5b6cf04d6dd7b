"""TLS between gateway and engine: each proves itself with a certificate of one authority, read again as it changes."""

from __future__ import annotations

import contextlib
import logging
import ssl
from pathlib import Path
from typing import Self

from sixfold_api.names import TLS_CA_FILE, TLS_CERTIFICATE_FILE, TLS_KEY_FILE

log = logging.getLogger(__name__)


class PeerContext(ssl.SSLContext):
    """A context for one side, over the files of a mounted Secret.

    Every handshake looks at the files, which are small: a rotated certificate or authority holds from the next
    connection on. Files that don't fit together, as in the middle of a change made by hand, are reported once, and the
    last good ones stay. Without any, every handshake fails. Connections that live are not touched.
    """

    def __new__(cls, directory: Path, *, is_server: bool) -> Self:
        return super().__new__(cls, _protocol(is_server))

    def __init__(self, directory: Path, *, is_server: bool) -> None:
        self._directory, self._is_server = directory, is_server
        self._contents: list[bytes] | None = None
        self._good: ssl.SSLContext | None = None
        self._problem = ""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begin a handshake; asyncio and whatever builds on it come here. Raises ssl.SSLError without certificates."""
        return self._newest().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    @property
    def problem(self) -> str:
        """Why the files as they are now can't be used; "" if they can."""
        with contextlib.suppress(ssl.SSLError):
            self._newest()
        return self._problem

    def _newest(self) -> ssl.SSLContext:
        try:
            names = (TLS_CA_FILE, TLS_CERTIFICATE_FILE, TLS_KEY_FILE)
            contents = [(self._directory / name).read_bytes() for name in names]
            if contents != self._contents:
                self._contents = contents
                self._good = self._load()
                self._problem = ""
                log.info("the certificate in %s is in use", self._directory)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            self._contents = None
            self._report(f"{self._directory}: {error}")
        if self._good is None:
            raise ssl.SSLError(f"no certificate to use: {self._problem}")
        return self._good

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(_protocol(self._is_server))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._directory / TLS_CA_FILE)
        context.load_cert_chain(self._directory / TLS_CERTIFICATE_FILE, self._directory / TLS_KEY_FILE)
        return context

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.error("the certificates can't be used%s: %s", ", the last good ones stay" * bool(self._good), problem)


def _protocol(is_server: bool) -> int:
    return ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
