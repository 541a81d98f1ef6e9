"""The real application over a real Valkey and a local object store, with a scripted worker.

It is served by uvicorn in a thread of its own; ``run`` reaches into that thread's event loop to
arrange and check around the API.
"""

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import uvicorn

from kvkeep_service.api.application import build_application
from kvkeep_service.config import Settings
from kvkeep_service.metrics import Metrics
from kvkeep_service.registry import Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects

from .scripted_worker import ScriptedWorker
from .stores import files_below

T = TypeVar("T")

DOCUMENT = "This agreement begins on 1 April 2026 and ends on 31 March 2029, both included."


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running server and what tests do around it."""

    url: str
    client: httpx2.Client
    worker: ScriptedWorker
    stores: Stores
    registry: Registry
    objects_dir: Path
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=30)

    def create(self, **fields: object) -> dict[str, Any]:
        """Register a document and wait until it is ready."""
        body = {"document": DOCUMENT, **fields}
        response = self.client.post("/contexts?wait=30", json=body)
        assert response.status_code == 200, response.text
        context: dict[str, Any] = response.json()
        return context

    def hold_builds(self) -> None:
        self.loop.call_soon_threadsafe(self.worker.may_build.clear)

    def release_builds(self) -> None:
        self.loop.call_soon_threadsafe(self.worker.may_build.set)

    def stored_files(self, *parts: str) -> list[str]:
        """Files of the object store whose path holds all of ``parts``."""
        names = files_below(self.objects_dir)
        return [name for name in names if all(part in name for part in parts)]


@contextmanager
def api_server(data_dir: Path, **settings: Any) -> Iterator[ApiServer]:
    """Serve until the ``with`` block ends."""
    store = EmbeddedStore(data_dir)
    store.start()
    started: Future[ApiServer] = Future()
    stopping = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(store, settings, data_dir, started, stopping)),
        daemon=True,
    )
    thread.start()
    try:
        yield started.result(timeout=60)
    finally:
        stopping.set()
        thread.join(timeout=30)
        store.stop()


async def _serve(
    store: EmbeddedStore,
    settings: dict[str, Any],
    data_dir: Path,
    started: "Future[ApiServer]",
    stopping: threading.Event,
) -> None:
    try:
        chosen = Settings(**settings)
        metadata = await Metadata.connect(store.redis_url)
        objects = Objects.open(store.objects_url)
        await bind_if_new(objects, metadata)
        stores = Stores(metadata, objects, Leases(metadata), Jobs(metadata), chosen.quotas)
        worker = ScriptedWorker(stores)
        registry = Registry(stores, worker, default_ttl_seconds=chosen.default_ttl_seconds)
        app = build_application(
            registry, worker, Metrics(worker, {"expired": 2, "freed_bytes": 300}, None), chosen
        )
        builds = asyncio.create_task(worker.run_builds())
        # With the protocol named, asyncio switches Nagle's algorithm off.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            config = uvicorn.Config(
                app, log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=2
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            with httpx2.Client(base_url=url, timeout=60) as client:
                loop = asyncio.get_running_loop()
                objects_dir = data_dir / "objects"
                started.set_result(
                    ApiServer(url, client, worker, stores, registry, objects_dir, loop)
                )
                await asyncio.to_thread(stopping.wait)
            server.should_exit = True
            await serving
        builds.cancel()
        await asyncio.gather(builds, return_exceptions=True)
        await registry.close()
        await metadata.close()
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        raise
