"""A line to a server that can be made slow, silent or short."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 * 1024


class TcpProxy:
    """Hands bytes on both ways, as it is told to at the time; new connections and old ones."""

    def __init__(self, url: str) -> None:
        """``url`` is that of the server behind."""
        self._behind = urlsplit(url)
        self._speaking = asyncio.Event()
        self._speaking.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.connections = 0
        self.bytes_asked = 0
        """Handed on to the server so far."""
        self.delay_seconds = 0.0
        """Before each piece of an answer."""
        self.answer_bytes: int | None = None
        """Of one connection; after as many the line is cut."""

    def fall_silent(self) -> None:
        """Take everything from now on, and answer nothing."""
        self._speaking.clear()

    def speak(self) -> None:
        """Hand on again, what was held back first."""
        self._speaking.set()

    def cut(self) -> None:
        """End every connection there is."""
        self.speak()
        for writer in self._writers:
            writer.transport.abort()

    async def until_asked(self, size_bytes: int) -> None:
        """Return once so much has been handed on to the server."""
        while self.bytes_asked < size_bytes:  # noqa: ASYNC110  # a look per chunk is enough
            await asyncio.sleep(0.001)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Stand between both ends of one connection until either is gone."""
        self.connections += 1
        try:
            there, back = await asyncio.open_connection(self._behind.hostname, self._behind.port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(
                self._hand_on(reader, back, asking=True),
                self._hand_on(there, writer, asking=False),
            )
        finally:
            self._writers -= {writer, back}

    async def _hand_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asking: bool
    ) -> None:
        room = None if asking else self.answer_bytes
        # A connection that the other end has broken is over, and no news.
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(0.0 if asking else self.delay_seconds)
                await self._speaking.wait()
                writer.write(data[:room])
                await writer.drain()
                if asking:
                    self.bytes_asked += len(data)
                elif room is not None and (room := room - len(data)) <= 0:
                    break
        writer.close()


@asynccontextmanager
async def tcp_proxy(url: str) -> AsyncIterator[TcpProxy]:
    """Serve a proxy on a free port of this machine, in the loop of the test."""
    proxy = TcpProxy(url)
    serving: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await asyncio.gather(*serving)
