"""What the URL of an object store says: where it is, and how to talk to it.

Credentials never stand in a URL. What is refused here is refused without being repeated, so
that a password written in the wrong place goes no further.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from kvkeep_storage.errors import Invalid

Checksum = Literal["sha256", "crc64nvme"]

S3_OPTIONS = ("endpoint", "region", "path_style", "checksum", "anonymous")
_CHECKSUMS: tuple[Checksum, ...] = ("sha256", "crc64nvme")
_FIELD = "objects_url"
# What stands in a host name or a path as it is.
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class LocalUrl:
    """A directory of this machine."""

    root: Path

    def __str__(self) -> str:
        return self.root.as_uri()


@dataclass(frozen=True, slots=True)
class S3Url:
    """A prefix, possibly empty, in a bucket of a server that speaks S3.

    None leaves ``endpoint`` and ``region`` to the environment, and then to AWS, and
    ``checksum`` to the digest that every signed request carries.
    """

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None
    path_style: bool = True
    checksum: Checksum | None = None
    anonymous: bool = False

    def __str__(self) -> str:
        place = "/".join(part for part in (f"s3://{self.bucket}", self.prefix) if part)
        return f"{place} at {self.endpoint}" if self.endpoint else place


@dataclass(frozen=True, slots=True)
class OtherUrl:
    """Anything else that obstore may know; handed to it as it is."""

    url: str

    def __str__(self) -> str:
        # The rest of a URL that is not ours may hold a key.
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname or ''}"


StoreUrl = LocalUrl | S3Url | OtherUrl


def parse_store_url(url: str) -> StoreUrl:
    """Read a store's URL; the options of S3 are in ``docs/stores.md``.

    Raises: Invalid for a URL that names no store, an unknown option, or a value that is none.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise Invalid(_FIELD, "is not a URL") from error
    if parts.scheme == "file":
        if parts.netloc or parts.query or parts.fragment or not parts.path.startswith("/"):
            raise Invalid(_FIELD, "a local directory is written file:///absolute/path")
        return LocalUrl(Path(unquote(parts.path)).resolve())
    if parts.scheme in ("s3", "s3a"):
        return _s3(parts.netloc, unquote(parts.path), parts.query, parts.fragment)
    if not parts.scheme or not parts.netloc:
        raise Invalid(_FIELD, "a store is written file:///directory or s3://bucket/prefix")
    return OtherUrl(url)


def _s3(bucket: str, path: str, query: str, fragment: str) -> S3Url:
    if "@" in bucket:
        raise Invalid(_FIELD, "credentials belong in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if not _NAME.fullmatch(bucket) or fragment:
        raise Invalid(_FIELD, "a bucket is written s3://bucket/prefix")
    prefix = path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise Invalid(_FIELD, "a prefix has no empty part, no '.' and no '..'")
    options = _options(query)
    checksum = options.get("checksum")
    return S3Url(
        bucket=bucket,
        prefix=prefix,
        endpoint=_endpoint(options.get("endpoint")),
        region=options.get("region"),
        path_style=_flag(options, "path_style", default=True),
        checksum=None if checksum is None else _checksum(checksum),
        anonymous=_flag(options, "anonymous", default=False),
    )


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in S3_OPTIONS:
            known = ", ".join(S3_OPTIONS)
            raise Invalid(_FIELD, f"there is no option {name!r}; there are {known}")
        if name in options or not value:
            raise Invalid(_FIELD, f"the option {name!r} needs exactly one value")
        if not (value.isascii() and value.isprintable()):
            raise Invalid(_FIELD, f"the value of {name!r} cannot stand in a request")
        options[name] = value
    return options


def _endpoint(value: str | None) -> str | None:
    if value is None:
        return None
    if not _is_endpoint(value):
        raise Invalid(_FIELD, "an endpoint is written http://host:port or https://host")
    return value.rstrip("/")


def _is_endpoint(value: str) -> bool:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        return False
    extra = "@" in parts.netloc or parts.query or parts.fragment or port == 0
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not extra


def _flag(options: dict[str, str], name: str, *, default: bool) -> bool:
    value = options.get(name)
    if value not in (None, "true", "false"):
        raise Invalid(_FIELD, f"{name} is true or false")
    return default if value is None else value == "true"


def _checksum(value: str) -> Checksum:
    for known in _CHECKSUMS:
        if value == known:
            return known
    raise Invalid(_FIELD, f"checksum is one of {', '.join(_CHECKSUMS)}")
