"""Where engines are: names, and the pods behind them."""

from __future__ import annotations

import asyncio
import socket

Address = tuple[str, int]


def parse_target(target: str) -> Address:
    """`host:port`, `1.2.3.4:port` or `[v6]:port`; raises ValueError."""
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"engine {target!r}: expected host:port")
    return host.strip("[]"), int(port)


async def resolve(address: Address) -> set[Address] | None:
    """Every pod behind a name; None where the name service can't tell at the moment."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        # A headless Service without ready pods has no name; everything else may be a fault of the DNS.
        return set() if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else None
    return {(str(entry[4][0]), int(entry[4][1])) for entry in found}


def authority(address: Address) -> str:
    """As in a URL."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
