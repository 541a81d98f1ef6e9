"""The clients: one that blocks, and its twin for event loops."""

import os
from types import TracebackType
from typing import Self

from kvkeep_client.async_contexts import AsyncContexts
from kvkeep_client.async_transport import AsyncTransport
from kvkeep_client.contexts import Contexts
from kvkeep_client.sendable import check_seconds
from kvkeep_client.transport import Transport

DEFAULT_URL = "http://127.0.0.1:8000"
# A long document on a slow machine is answered late; silence beyond this is a fault.
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_MAX_RETRIES = 2


class KVKeep:
    """A connection to one kvkeep server. Use it as a context manager, or ``close()`` it.

    Threads may share one client.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        """Take ``KVKEEP_URL`` and ``KVKEEP_API_KEY`` from the environment where not given.

        ``timeout_seconds`` is the longest silence of the server that is put up with;
        ``max_retries`` is how often a request that failed for a passing reason is repeated.
        Nothing is sent yet. Raises: TypeError, ValueError, for a URL that is not http:// or
        https://, or names no host, and for an API key that a header cannot carry.
        """
        _check_limits(timeout_seconds, max_retries)
        self._transport = Transport(
            _url(url),
            api_key or os.environ.get("KVKEEP_API_KEY"),
            timeout_seconds=timeout_seconds,
            max_retries=max_retries,
        )
        self.contexts = Contexts(self._transport)

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._transport.url

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        """Close the connections at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections."""
        self.close()


class AsyncKVKeep:
    """As ``KVKeep``, for one event loop: ``async with`` it, or ``await close()``."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        """As ``KVKeep``."""
        _check_limits(timeout_seconds, max_retries)
        self._transport = AsyncTransport(
            _url(url),
            api_key or os.environ.get("KVKEEP_API_KEY"),
            timeout_seconds=timeout_seconds,
            max_retries=max_retries,
        )
        self.contexts = AsyncContexts(self._transport)

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._transport.url

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        """Close the connections at the end of the block."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections."""
        await self.close()


def _url(given: str | None) -> str:
    url = given or os.environ.get("KVKEEP_URL") or DEFAULT_URL
    if not isinstance(url, str):
        raise TypeError(f"the server's URL must be a text, not {type(url).__name__}")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the server's URL must start with http:// or https://, not {url!r}")
    return url.rstrip("/")


def _check_limits(timeout_seconds: float, max_retries: int) -> None:
    check_seconds(timeout_seconds, "timeout_seconds")
    if timeout_seconds == 0:
        raise ValueError("timeout_seconds: must be above 0")
    if type(max_retries) is not int or max_retries < 0:
        raise ValueError(f"max_retries: must be a whole number of at least 0, not {max_retries!r}")
