"""Contexts: documents that the service has read, and the questions asked about them."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, Unpack

from kvkeep_client import calls
from kvkeep_client.answers import AnswerStream
from kvkeep_client.calls import Asked, CreateOptions, Order, QueryOptions
from kvkeep_client.errors import (
    ContextExpired,
    ContextFailed,
    KVKeepError,
    Problem,
    StreamInterrupted,
    TimedOut,
)
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
from kvkeep_client.sessions import Session
from kvkeep_client.transport import Transport

PAGE_SIZE = 100
# How long a lost event stream is left alone before the state is asked for again.
REJOIN_SECONDS = 1.0


class Context:
    """One registered document. ``info`` is what the server last said about it."""

    def __init__(self, transport: Transport, info: ContextInfo) -> None:
        self._transport = transport
        self.info = info

    def __repr__(self) -> str:
        return f"Context({self.id!r}, status={self.status!r}, name={self.name!r})"

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

    def refresh(self) -> Self:
        """Ask the server again. Modifies ``info``."""
        self.info = read_context(self._transport.fields(calls.get_context(self.id)))
        return self

    def wait(self, *, timeout_seconds: float | None = None, progress: bool = False) -> Self:
        """Return once questions can be asked. Modifies ``info``.

        ``progress`` shows a bar on standard error, or one line per stage without rich.
        Raises: ContextFailed and ContextExpired, when it never will be ready; TimedOut; what
            ``refresh`` raises while the server is away. Each names the context in ``context_id``.
        """
        with waiting_for(self.id), build_bar(self.name or self.id, shown=progress) as show:
            for info in self.events(timeout_seconds=timeout_seconds):
                show(info)
            if not self.info.is_ready:
                raise never_ready(self.info)
        return self

    def events(self, *, timeout_seconds: float | None = None) -> Iterator[ContextInfo]:
        """Yield the state now and at every change, until it is ready, failed or expired.

        A broken connection is joined again. Modifies ``info``.
        Raises: TimedOut, when that is not reached in time.
        """
        check_seconds(timeout_seconds, "timeout_seconds")
        give_up_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            yield self.refresh().info
            # A connection that broke off is joined again below, while there is time.
            with suppress(StreamInterrupted, TimedOut):
                yield from self._follow(give_up_at)
            if self.info.is_settled:
                return
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise TimedOut(
                    f"context {self.id} is still {self.status} after {timeout_seconds} s"
                )
            self._transport.pause(REJOIN_SECONDS)

    def _follow(self, give_up_at: float | None) -> Iterator[ContextInfo]:
        if self.info.is_settled:
            return
        call = calls.watch_context(self.id)
        with self._transport.events(call, give_up_at=give_up_at) as events:
            for event in events:
                self.info = read_context(event.data)
                yield self.info
                if self.info.is_settled:
                    return

    def query(self, question: Asked, **options: Unpack[QueryOptions]) -> Answer:
        """Ask one question and return the whole answer.

        ``question`` may be a conversation that ends with one: messages of "user" and "assistant"
        in turns. Raises: ContextNotReady, QuestionTooLong and the other errors of the API;
            TypeError, ValueError, naming the argument, for what cannot be sent at all.
        """
        call = calls.query(self.id, question, stream=False, **options)
        return read_answer(self._transport.fields(call))

    def query_many(
        self, questions: Sequence[str], **options: Unpack[QueryOptions]
    ) -> tuple[Answer, ...]:
        """Ask up to 64 questions at once, each as if it were alone; answers in their order.

        Raises: as ``query``; one question that fails ends all.
        """
        call = calls.query_many(self.id, questions, **options)
        return read_answers(self._transport.fields(call))

    def stream(self, question: Asked, **options: Unpack[QueryOptions]) -> AnswerStream:
        """Ask one question, or go on with a conversation; return its text as it is generated.

        The question is sent here, so errors before the first token are raised here.
        """
        call = calls.query(self.id, question, stream=True, **options)
        return AnswerStream(self._transport.events(call))

    def session(self, answer: Answer | str | None = None) -> Session:
        """Begin a conversation, or go on from an earlier answer or its id. Sends nothing."""
        answer_id = answer.id if isinstance(answer, Answer) else answer
        return Session(self._transport, self.id, answer_id)

    def update(
        self,
        *,
        name: str | Unset | None = UNSET,
        metadata: Mapping[str, str] | Unset = UNSET,
        expires_after: ExpiresAfter | Unset | None = UNSET,
    ) -> Self:
        """Change what is given; None removes a name or an expiry. Modifies ``info``."""
        call = calls.update_context(
            self.id, name=name, metadata=metadata, expires_after=expires_after
        )
        self.info = read_context(self._transport.fields(call))
        return self

    def rebuild(self) -> Self:
        """Have the cache built again: after a failure, or to replace it. Modifies ``info``.

        A failed context is queued: ``wait()`` for it. A ready one stays ready and answers from
        its present cache until the new one is there.
        Raises: BuildMismatch, when the server would build another cache than the one that was
            registered; Conflict, when the stored document is damaged; QuotaExceeded and the other
            errors of the API.
        """
        self.info = read_context(self._transport.fields(calls.rebuild_context(self.id)))
        return self

    def prefetch(self) -> Self:
        """Have it loaded, so that the next question finds it in memory. Modifies ``info``.

        Returns at once. It is a hint, and whether it helped shows in an answer's ``timings``.
        Raises: ContextNotReady; Overloaded, when as many are being loaded so as may be.
        """
        self.info = read_context(self._transport.fields(calls.prefetch_context(self.id)))
        return self

    def document(self) -> str:
        """Return the text that was registered."""
        return self._transport.fields(calls.get_document(self.id)).text("document")

    def delete(self) -> None:
        """Delete it with its cache; deleting twice is fine."""
        self._transport.nothing(calls.delete_context(self.id))


class Contexts:
    """All contexts of one API key."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        document: str | None = None,
        *,
        path: str | Path | None = None,
        progress: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> Context:
        """Register a document, given as text or as the path of a UTF-8 file.

        Returns as soon as the server has accepted it: ``wait()`` until it is ready. With
        ``progress`` this waits, and shows a bar; an error while it waits has the ``context_id``,
        so that ``get`` finds it again. Retries never register a document twice.
        Raises: ValueError, for both or neither of text and path, or a file that is not UTF-8;
            TypeError, ValueError, naming the argument, for what cannot be sent at all; OSError,
            for a file that cannot be read; EmptyDocument, DocumentTooLong and the other errors of
            the API.
        """
        text = one_text(document, path)
        key = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
        call = calls.create_context(text, idempotency_key=key, **options)
        context = Context(self._transport, read_context(self._transport.fields(call)))
        return context.wait(progress=True) if progress else context

    def get(self, context_id: str) -> Context:
        """Look up one context. Raises: ContextNotFound."""
        fields = self._transport.fields(calls.get_context(context_id))
        return Context(self._transport, read_context(fields))

    def list(
        self,
        *,
        status: str | None = None,
        metadata: Mapping[str, str] | None = None,
        order: Order = "desc",
    ) -> Iterator[Context]:
        """Yield contexts by time of creation, newest first; pages are fetched as needed."""
        after: str | None = None
        while True:
            call = calls.list_contexts(
                limit=PAGE_SIZE, after=after, order=order, status=status, metadata=metadata or {}
            )
            page = read_page(self._transport.fields(call))
            for info in page.contexts:
                yield Context(self._transport, info)
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    def delete(self, context_id: str) -> None:
        """Delete one context; an unknown one is no error."""
        self._transport.nothing(calls.delete_context(context_id))


@contextmanager
def waiting_for(context_id: str) -> Iterator[None]:
    """Have an error that ends the wait for a context name it: nobody else may know it yet."""
    try:
        yield
    except KVKeepError as error:
        error.context_id = context_id
        error.add_note(f"This ended the wait for context {context_id}.")
        raise


def one_text(document: str | None, path: str | Path | None) -> str:
    """The document itself or the text of a file. Raises: ValueError; OSError."""
    if document is not None and path is None:
        return document
    if document is None and path is not None:
        try:
            # Bytes, not text mode: line ends are part of the document.
            return Path(path).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error
    raise ValueError("give either document=… or path=…")


def never_ready(info: ContextInfo) -> ContextFailed | ContextExpired:
    """Why a context that is settled, and not ready, never will be."""
    facts: dict[str, object] = {"context_id": info.id}
    if info.status == "expired":
        detail = f"context {info.id} expired at {info.expires_at}"
        return ContextExpired(Problem(410, "context_expired", detail, None, None, facts))
    reason = "no reason given"
    if info.error is not None:
        reason = info.error.detail
        facts["error_code"] = info.error.code
    detail = f"context {info.id} failed: {reason}"
    return ContextFailed(Problem(409, "context_failed", detail, None, None, facts))
