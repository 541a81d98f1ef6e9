"""Contexts without blocking: the twin of ``contexts.py``."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, Unpack

from kvkeep_client import calls
from kvkeep_client.async_answers import AsyncAnswerStream, AsyncSession
from kvkeep_client.async_transport import AsyncTransport
from kvkeep_client.calls import Asked, CreateOptions, Order, QueryOptions
from kvkeep_client.contexts import PAGE_SIZE, REJOIN_SECONDS, never_ready, one_text, waiting_for
from kvkeep_client.errors import StreamInterrupted, TimedOut
from kvkeep_client.models import (
    UNSET,
    Answer,
    ContextInfo,
    ExpiresAfter,
    Unset,
    read_answer,
    read_answers,
    read_context,
    read_page,
)
from kvkeep_client.progress import build_bar
from kvkeep_client.sendable import check_seconds


class AsyncContext:
    """One registered document; see ``Context``. ``info`` is what the server last said about it."""

    def __init__(self, transport: AsyncTransport, info: ContextInfo) -> None:
        self._transport = transport
        self.info = info

    def __repr__(self) -> str:
        return f"AsyncContext({self.id!r}, status={self.status!r}, name={self.name!r})"

    @property
    def id(self) -> str:
        """The id, ``ctx_`` and 26 characters."""
        return self.info.id

    @property
    def name(self) -> str | None:
        """The name it was given."""
        return self.info.name

    @property
    def status(self) -> str:
        """The status last seen: queued, building, rebuilding, ready, failed or expired."""
        return self.info.status

    async def refresh(self) -> Self:
        """Ask the server again. Modifies ``info``."""
        self.info = read_context(await self._transport.fields(calls.get_context(self.id)))
        return self

    async def wait(self, *, timeout_seconds: float | None = None, progress: bool = False) -> Self:
        """As ``Context.wait``."""
        with waiting_for(self.id), build_bar(self.name or self.id, shown=progress) as show:
            async for info in self.events(timeout_seconds=timeout_seconds):
                show(info)
            if not self.info.is_ready:
                raise never_ready(self.info)
        return self

    async def events(self, *, timeout_seconds: float | None = None) -> AsyncIterator[ContextInfo]:
        """As ``Context.events``."""
        check_seconds(timeout_seconds, "timeout_seconds")
        give_up_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            yield (await self.refresh()).info
            # A connection that broke off is joined again below, while there is time.
            with suppress(StreamInterrupted, TimedOut):
                async for info in self._follow(give_up_at):
                    yield info
            if self.info.is_settled:
                return
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise TimedOut(
                    f"context {self.id} is still {self.status} after {timeout_seconds} s"
                )
            await self._transport.pause(REJOIN_SECONDS)

    async def _follow(self, give_up_at: float | None) -> AsyncIterator[ContextInfo]:
        if self.info.is_settled:
            return
        call = calls.watch_context(self.id)
        async with await self._transport.events(call, give_up_at=give_up_at) as events:
            async for event in events:
                self.info = read_context(event.data)
                yield self.info
                if self.info.is_settled:
                    return

    async def query(self, question: Asked, **options: Unpack[QueryOptions]) -> Answer:
        """As ``Context.query``."""
        call = calls.query(self.id, question, stream=False, **options)
        return read_answer(await self._transport.fields(call))

    async def query_many(
        self, questions: Sequence[str], **options: Unpack[QueryOptions]
    ) -> tuple[Answer, ...]:
        """As ``Context.query_many``."""
        call = calls.query_many(self.id, questions, **options)
        return read_answers(await self._transport.fields(call))

    async def stream(self, question: Asked, **options: Unpack[QueryOptions]) -> AsyncAnswerStream:
        """As ``Context.stream``: ``async for piece in await context.stream(…)``."""
        call = calls.query(self.id, question, stream=True, **options)
        return AsyncAnswerStream(await self._transport.events(call))

    def session(self, answer: Answer | str | None = None) -> AsyncSession:
        """As ``Context.session``."""
        answer_id = answer.id if isinstance(answer, Answer) else answer
        return AsyncSession(self._transport, self.id, answer_id)

    async def update(
        self,
        *,
        name: str | Unset | None = UNSET,
        metadata: Mapping[str, str] | Unset = UNSET,
        expires_after: ExpiresAfter | Unset | None = UNSET,
    ) -> Self:
        """As ``Context.update``."""
        call = calls.update_context(
            self.id, name=name, metadata=metadata, expires_after=expires_after
        )
        self.info = read_context(await self._transport.fields(call))
        return self

    async def rebuild(self) -> Self:
        """As ``Context.rebuild``."""
        self.info = read_context(await self._transport.fields(calls.rebuild_context(self.id)))
        return self

    async def prefetch(self) -> Self:
        """As ``Context.prefetch``."""
        self.info = read_context(await self._transport.fields(calls.prefetch_context(self.id)))
        return self

    async def document(self) -> str:
        """Return the text that was registered."""
        return (await self._transport.fields(calls.get_document(self.id))).text("document")

    async def delete(self) -> None:
        """Delete it with its cache; deleting twice is fine."""
        await self._transport.nothing(calls.delete_context(self.id))


class AsyncContexts:
    """All contexts of one API key; see ``Contexts``."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        document: str | None = None,
        *,
        path: str | Path | None = None,
        progress: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> AsyncContext:
        """As ``Contexts.create``; a file is read in a thread."""
        text = await asyncio.to_thread(one_text, document, path)
        key = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
        call = calls.create_context(text, idempotency_key=key, **options)
        context = AsyncContext(self._transport, read_context(await self._transport.fields(call)))
        return await context.wait(progress=True) if progress else context

    async def get(self, context_id: str) -> AsyncContext:
        """Look up one context. Raises: ContextNotFound."""
        fields = await self._transport.fields(calls.get_context(context_id))
        return AsyncContext(self._transport, read_context(fields))

    async def list(
        self,
        *,
        status: str | None = None,
        metadata: Mapping[str, str] | None = None,
        order: Order = "desc",
    ) -> AsyncIterator[AsyncContext]:
        """Yield contexts by time of creation, newest first; pages are fetched as needed."""
        after: str | None = None
        while True:
            call = calls.list_contexts(
                limit=PAGE_SIZE, after=after, order=order, status=status, metadata=metadata or {}
            )
            page = read_page(await self._transport.fields(call))
            for info in page.contexts:
                yield AsyncContext(self._transport, info)
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    async def delete(self, context_id: str) -> None:
        """Delete one context; an unknown one is no error."""
        await self._transport.nothing(calls.delete_context(context_id))
