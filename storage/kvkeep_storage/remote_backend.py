"""An object store across a network. The only place that knows obstore.

Requests that fail for a moment are repeated by obstore, one by one: a part of an upload, a
range, a page. How often it has tried goes along with the error, so that whoever repeats the
whole operation (``retries.retrying``) stays within the same number of attempts.
"""

import asyncio
import errno
import os
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store, from_url

from kvkeep_storage.backends import ObjectInfo, RemoteTrouble
from kvkeep_storage.errors import Invalid
from kvkeep_storage.pieces import Filled, scatter
from kvkeep_storage.retries import ATTEMPTS, PAUSE_SECONDS_FIRST, PAUSE_SECONDS_MAX
from kvkeep_storage.store_url import OtherUrl, S3Url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

# Of one upload. The parts in flight share the line, and each must be answered before its silence
# counts as the server's: 32 MiB in 10 s is less than the rate at which transfers count as stalled.
_PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_ONCE = 4
# As many as a server puts on one page.
_OBJECTS_PER_PAGE = 1000
_CONNECT_SECONDS = 5
# Of the deadline of an operation: what is left after one silence is enough to try again.
_SILENCE_SHARE = 1 / 3
_STATUS = re.compile(r"status code: (\d{3}) ?([^:\n]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_RETRIES = re.compile(r"after (\d+) retries")
_CAUSE = re.compile(r'message: "([^"]+)"|error: "([^"]+)"|source: (TimedOut|BadScheme)')
_NO_SPACE = frozenset(
    {"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage"}
)
_NO_STORE = frozenset({"NoSuchBucket", "ContainerNotFound"})
_REFUSED = frozenset({401, 403})
_NO_REQUEST = "no request can be made of the AWS_ variables: does a value end in a line break?"
_WRITING = re.compile(r"performing (?:PUT|POST) ")
# Where a process on a cloud's machine asks for credentials when the environment has none.
_INSTANCE_CREDENTIALS = "/latest/api/token"


class RemoteBackend:
    """A bucket, or whatever obstore takes for one."""

    is_remote = True

    def __init__(self, store: "ObjectStore", location: str = "memory") -> None:
        """``location`` is what people are told of it."""
        self._store = store
        self.location = location

    @classmethod
    def open(cls, url: S3Url | OtherUrl, *, deadline_seconds: float) -> "RemoteBackend":
        """Open a store; nothing is sent yet. ``deadline_seconds`` bounds one operation.

        Raises: Invalid for a URL that names no store.
        """
        client = _client(deadline_seconds)
        retries = _retries(deadline_seconds)
        try:
            if isinstance(url, OtherUrl):
                opened = from_url(url.url, client_options=client, retry_config=retries)
                return cls(opened, str(url))
            if url.endpoint is not None:
                client["allow_http"] = url.endpoint.startswith("http://")
            store = S3Store(
                url.bucket,
                prefix=url.prefix or None,
                config=_s3_config(url),
                client_options=client,
                retry_config=retries,
            )
        except (BaseError, ValueError):
            # The text of the original repeats the URL, whatever is in it.
            raise Invalid("objects_url", f"{url} names no store that can be opened") from None
        return cls(store, str(url))

    async def put(self, key: str, content: bytes) -> None:
        """Store an object over whatever is there; a large one in parallel parts."""
        with _translated(key):
            await obstore.put_async(
                self._store,
                key,
                content,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

    async def put_if_absent(self, key: str, content: bytes) -> None:
        """Store an object unless there is one: one request, since parts lose the condition."""
        with _translated(key):
            await obstore.put_async(self._store, key, content, mode="create")

    async def get(self, key: str) -> bytes:
        """Read an object whole."""
        with _translated(key):
            result = await obstore.get_async(self._store, key)
            return bytes(await result.bytes_async())

    async def read(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """Fill buffers from one ranged request. Modifies: ``into``, once all bytes are here.

        In a thread, which a cancellation does not end: new memory takes long to touch.
        """
        size_bytes = sum(map(len, into))
        if not size_bytes:
            if await self.size(key) < start:
                raise EOFError(f"ends before byte {start}")
            return
        with _translated(key):
            content = memoryview(
                await obstore.get_range_async(self._store, key, start=start, length=size_bytes)
            )
        # A store answers with what it has, when that is less than was asked for.
        if len(content) != size_bytes:
            raise EOFError(f"{len(content)} of {size_bytes} bytes arrived")
        await asyncio.to_thread(scatter, content, into, start, on_filled)

    async def size(self, key: str) -> int:
        """Size of an object in bytes."""
        try:
            with _translated(key):
                return (await obstore.head_async(self._store, key))["size"]
        except FileNotFoundError:
            # An answer to HEAD has no body: only GET tells a missing object from a missing bucket.
            with _translated(key):
                return (await obstore.get_async(self._store, key)).meta["size"]

    async def delete(self, key: str) -> None:
        """Remove an object."""
        try:
            with _translated(key):
                await obstore.delete_async(self._store, key)
        except FileNotFoundError:
            return

    async def pages(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """Every object below a directory, a page at a time."""
        stream = aiter(obstore.list(self._store, prefix, chunk_size=_OBJECTS_PER_PAGE))
        while True:
            with _translated(prefix):
                page = await anext(stream, None)
            if page is None:
                return
            yield [
                ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for meta in page
            ]

    async def delete_temporary_files(self, older_than_seconds: float) -> list[int]:
        """Nothing: unfinished uploads are out of sight; rules of the bucket end them."""
        del older_than_seconds
        return []


def _client(deadline_seconds: float) -> "ClientConfig":
    return {
        "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, deadline_seconds)),
        "read_timeout": timedelta(seconds=deadline_seconds * _SILENCE_SHARE),
        # One request may rightly take long when it moves much: `Objects` bounds the whole.
        "timeout": timedelta(days=1),
    }


def _retries(deadline_seconds: float) -> "RetryConfig":
    return {
        "max_retries": ATTEMPTS - 1,
        "retry_timeout": timedelta(seconds=deadline_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=PAUSE_SECONDS_FIRST),
            "max_backoff": timedelta(seconds=PAUSE_SECONDS_MAX),
            "base": 2,
        },
    }


def _s3_config(url: S3Url) -> "S3Config":
    """What the URL says; obstore reads the rest, credentials among it, from ``AWS_`` variables."""
    config: S3Config = {
        # We delete one by one, and not every server has the request that deletes many.
        "disable_bulk_delete": True,
        "virtual_hosted_style_request": not url.path_style,
    }
    if url.endpoint is not None:
        config["endpoint"] = url.endpoint
        if not url.path_style:
            scheme, _, host = url.endpoint.partition("://")
            config["endpoint"] = f"{scheme}://{url.bucket}.{host}"
    if url.region is not None:
        config["region"] = url.region
    if url.checksum is not None:
        config["checksum_algorithm"] = url.checksum
    if url.anonymous:
        config["skip_signature"] = True
    return config


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Raise what a backend raises instead of what obstore does.

    The original is left out: its text is pages of internals, and servers repeat in it what
    they were sent.
    """
    try:
        yield
    except AlreadyExistsError:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key) from None
    except (BaseError, FileNotFoundError) as error:
        raise _translate(error, key) from None
    except Exception as error:
        # Over what cannot stand in a request; the class is nowhere to be imported from.
        if type(error).__name__ != "RustPanic":
            raise
        raise RemoteTrouble(_NO_REQUEST, attempts=ATTEMPTS) from None


def _translate(error: BaseError | FileNotFoundError, key: str) -> OSError | EOFError:
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else None
    if status == 507 or code in _NO_SPACE:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), key)
    if status == 416:
        return EOFError("ends before the range begins")
    missing = isinstance(error, FileNotFoundError) and code not in _NO_STORE
    # What cannot be written is not missing: its bucket is, or the upload it was a part of.
    if missing and not _WRITING.search(text):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
    attempts = 1 + int(found[1]) if (found := _RETRIES.search(text)) else 1
    if status in _REFUSED or code in _NO_STORE:
        attempts = ATTEMPTS
    return RemoteTrouble(_reason(text), attempts=attempts)


def _reason(text: str) -> str:
    """One line: what the server answered, or why there is no answer."""
    if _INSTANCE_CREDENTIALS in text:
        return (
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
            " or anonymous=true in the URL"
        )
    if status := _STATUS.search(text):
        details = [found[1] for pattern in (_CODE, _MESSAGE) if (found := pattern.search(text))]
        return ": ".join([f"{status[1]} {status[2].strip()}".strip(), *details])
    if "HTTP error" in text:
        causes = [next(filter(None, found)) for found in _CAUSE.findall(text)]
        if "BadScheme" in causes:
            return "http:// is used only where the endpoint in the store's URL says so"
        return f"no answer ({causes[-1]})" if causes else "no answer"
    return text.partition("\n")[0]
