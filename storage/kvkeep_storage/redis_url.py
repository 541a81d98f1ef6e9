"""Where Redis is: the URL forms that redis-py does not know, taken apart.

    redis+sentinel://[user:password@]host[:port],host[:port]/service[/database]
    redis+cluster://[user:password@]host[:port],host[:port]

User, password, service and the host names may be percent-encoded. User and password are those of
Redis itself; sentinels are asked without any. A URL holds secrets, and which part of a malformed
one is a secret cannot be known: no error repeats any of it.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import unquote

from kvkeep_storage.errors import Invalid

SENTINEL_SCHEME: Final = "redis+sentinel"
CLUSTER_SCHEME: Final = "redis+cluster"
_SENTINEL_PORT: Final = 26379
_REDIS_PORT: Final = 6379


class Host(NamedTuple):
    """Where one server listens."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """Sentinels, and the service whose primary they know."""

    sentinels: tuple[Host, ...]
    service: str
    database: int
    username: str | None
    password: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Some nodes of a cluster, which know the others."""

    nodes: tuple[Host, ...]
    username: str | None
    password: str | None = field(repr=False)


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; empty when it has none."""
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else ""


def check_database(url: str) -> None:
    """Refuse a ``redis`` or ``rediss`` URL whose path is no number: redis-py would ignore it.

    Raises: Invalid, without repeating any of it.
    """
    _, _, path = url.partition("://")[2].partition("?")[0].partition("/")
    if path and not _is_number(path):
        raise _malformed("after host and port only the number of a database may stand")


def parse_sentinel(url: str) -> SentinelAddress:
    """Take a ``redis+sentinel`` URL apart. Raises: Invalid, without repeating any of it."""
    parts = _Parts.of(url)
    service, _, database = parts.path.partition("/")
    if not service:
        raise _malformed("the name of the service is missing: redis+sentinel://host:port/NAME")
    if database and not _is_number(database):
        raise _malformed("after the service only the number of a database may stand")
    return SentinelAddress(
        _hosts(parts.hosts, _SENTINEL_PORT),
        unquote(service),
        int(database or 0),
        parts.username,
        parts.password,
    )


def parse_cluster(url: str) -> ClusterAddress:
    """Take a ``redis+cluster`` URL apart. Raises: Invalid, without repeating any of it."""
    parts = _Parts.of(url)
    if parts.path:
        raise _malformed("a cluster has no databases: nothing may follow its hosts")
    return ClusterAddress(_hosts(parts.hosts, _REDIS_PORT), parts.username, parts.password)


@dataclass(frozen=True, slots=True)
class _Parts:
    hosts: str
    path: str
    username: str | None
    password: str | None = field(repr=False)

    @classmethod
    def of(cls, url: str) -> "_Parts":
        # Not urlsplit: it takes several hosts for one, and quotes what it cannot read.
        _, _, rest = url.partition("://")
        if "?" in rest or "#" in rest:
            raise _malformed("this form takes no options; write ? and # in a password as %3F, %23")
        location, _, path = rest.partition("/")
        login, separator, hosts = location.rpartition("@")
        username, _, password = login.partition(":")
        return cls(
            hosts if separator else location,
            path,
            unquote(username) or None,
            unquote(password) or None,
        )


def _hosts(text: str, default_port: int) -> tuple[Host, ...]:
    return tuple(
        _host(item, default_port, number) for number, item in enumerate(text.split(","), start=1)
    )


def _host(text: str, default_port: int, number: int) -> Host:
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        is_whole = bool(bracket) and (not port or port.startswith(":"))
        port = port.removeprefix(":")
    else:
        name, _, port = text.partition(":")
        is_whole = True
    if not name or not is_whole:
        raise _malformed(f"host number {number} cannot be read")
    if not port:
        return Host(unquote(name), default_port)
    if not (_is_number(port) and 0 < int(port) < 65536):
        raise _malformed(f"the port of host number {number} is not one")
    return Host(unquote(name), int(port))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _malformed(reason: str) -> Invalid:
    return Invalid("redis url", reason)
