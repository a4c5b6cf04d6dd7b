"""Where a policy's Redis is: the mounted folder with its URL, and the client that the URL stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from sixfold_api.names import REDIS_CA_FILE, REDIS_URL_FILE

CONNECT_SECONDS = 1.0
REPLY_SECONDS = 5.0
"""The longest that any command may take; whoever waits for it has a shorter limit of their own."""
MAX_CONNECTIONS = 8
_READ_BYTES = 1 << 20
_SINGLE, _SENTINEL, _CLUSTER = "", "sentinel", "cluster"
_PORTS = {_SINGLE: 6379, _SENTINEL: 26379, _CLUSTER: 6379}
_OPTIONS = ("sentinel_username", "sentinel_password")
Client = Redis | RedisCluster


class AddressError(Exception):
    """The folder has no usable address. The message never holds any part of the URL."""


@dataclass(frozen=True)
class RedisAddress:
    """`str` and `repr` of it don't show credentials.

    Attributes:
        kind: "", "sentinel" or "cluster".
        service: that Sentinel watches.
        authority: PEM certificates to trust; "": those that the image trusts.
    """

    kind: str
    is_tls: bool
    hosts: tuple[tuple[str, int], ...]
    service: str = ""
    database: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    authority: str = field(default="", repr=False)


def read_address(directory: Path | None) -> RedisAddress:
    """What the folder says now. Raises AddressError."""
    if directory is None:
        raise AddressError("no address of a Redis was given")
    try:
        url = (directory / REDIS_URL_FILE).read_text().strip()
        authority_file = directory / REDIS_CA_FILE
        authority = authority_file.read_text() if authority_file.exists() else ""
    except FileNotFoundError:
        raise AddressError("the Secret with the address of Redis, or its entry, doesn't exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise AddressError(f"the address of Redis can't be read: {type(error).__name__}") from None
    return parse_url(url, authority)


def parse_url(url: str, authority: str = "") -> RedisAddress:
    """Read redis://[user:password@]host[:port][/database], rediss:// for TLS, redis+cluster://host,host,... and
    redis+sentinel://host,host,.../service[/database], the last with the Sentinels' own credentials, where they have
    any, as ?sentinel_username=...&sentinel_password=...

    Raises:
        AddressError: it is none of them.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise AddressError("the URL of Redis can't be read") from None
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss") or kind not in _PORTS or (not kind and "+" in parts.scheme):
        raise AddressError(
            "the URL of Redis must begin with redis://, rediss:// (TLS), redis+sentinel:// or redis+cluster://"
        )
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    options = dict(parse_qsl(parts.query))
    if set(options) - set(_OPTIONS) or (options and kind != _SENTINEL):
        raise AddressError("the URL of Redis has options that aren't known: only sentinel_username, sentinel_password")
    addresses = tuple(_host(host, _PORTS[kind]) for host in hosts.split(","))
    if len(addresses) > 1 and kind == _SINGLE:
        raise AddressError("the URL of Redis has several hosts: only one fits to redis:// and rediss://")
    service, database = _path(parts, kind)
    return RedisAddress(
        kind=kind,
        is_tls=scheme == "rediss",
        hosts=addresses,
        service=service,
        database=database,
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        authority=authority,
    )


def connect(address: RedisAddress) -> Client:
    """A client with bounded connections that are made when needed; nothing is sent yet."""
    common = {
        "username": address.username,
        "password": address.password,
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": REPLY_SECONDS,
        "socket_read_size": _READ_BYTES,
        "max_connections": MAX_CONNECTIONS,
        "protocol": 2,
        # Once more with a new connection: idle ones don't live through a restart of the server.
        "retry": Retry(NoBackoff(), 1),
        **_tls(address),
    }
    if address.kind == _CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **common)
    if address.kind == _SENTINEL:
        own = {
            "username": address.sentinel_username,
            "password": address.sentinel_password,
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": CONNECT_SECONDS,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            **_tls(address),
        }
        sentinel = Sentinel(list(address.hosts), sentinel_kwargs=own)  # type: ignore[no-untyped-call]
        master: Redis = sentinel.master_for(address.service, db=address.database, **common)
        return master
    ((host, port),) = address.hosts
    return Redis(host=host, port=port, db=address.database, **common)


async def disconnect(client: Client) -> None:
    """Close all its connections, those to Sentinels among them."""
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _tls(address: RedisAddress) -> dict[str, Any]:
    if not address.is_tls:
        return {}
    return {"ssl": True, "ssl_cert_reqs": "required", "ssl_ca_data": address.authority or None}


def _path(parts: SplitResult, kind: str) -> tuple[str, int]:
    """Service and database."""
    words = [unquote(word) for word in parts.path.split("/") if word]
    service = words.pop(0) if kind == _SENTINEL and words else ""
    database = words.pop(0) if words else "0"
    if kind == _SENTINEL and not service:
        raise AddressError("the URL of Redis names no service: redis+sentinel://host:26379/service")
    if words or not database.isdecimal() or (kind == _CLUSTER and int(database)):
        raise AddressError("the URL of Redis ends in something that is no number of a database; a cluster has only 0")
    return service, int(database)


def _host(text: str, default_port: int) -> tuple[str, int]:
    host, port = text, str(default_port)
    if text.startswith("["):  # IPv6
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif ":" in text:
        host, _, port = text.partition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AddressError("the URL of Redis has a host or port that can't be read; is a special character of the "
                           "password not percent-encoded?")  # fmt: skip
    return host, int(port)
