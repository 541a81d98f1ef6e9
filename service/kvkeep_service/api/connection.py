"""The client's end of a request: noticing that it has gone, and stopping the work then."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the response any more; there is no one to tell."""


async def until_gone(receive: Receive) -> None:
    """Return once the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result; cancel it when the client goes away first.

    Raises: ClientGone, once the work has ended its clean-up; else what the work raises.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(until_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGone
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
