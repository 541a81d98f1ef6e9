"""``POST /contexts/{id}/query``: one question, one answer, whole or as it is written.

A client that goes away stops its generation: the worker's iterator is closed whatever ends the
request.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from fastapi import APIRouter, Depends, Request, Response

from kvkeep_service.api.answer_views import AnswerView, TokenView
from kvkeep_service.api.connection import while_connected
from kvkeep_service.api.errors import BODY, COMMON, responses
from kvkeep_service.api.events import event, start_stream
from kvkeep_service.api.requests import (
    ContextId,
    TheMetrics,
    TheRegistry,
    TheWorker,
    Wait,
    json_only,
    only_parameters,
    seconds_to_wait,
)
from kvkeep_service.api.schemas import Query
from kvkeep_service.api.security import Tenant
from kvkeep_service.budget import check_ratio
from kvkeep_service.errors import ContextNotReady, WorkerUnavailable
from kvkeep_service.ids import new_answer_id
from kvkeep_service.metrics import Metrics
from kvkeep_service.ports import AnswerEvent, QueryRequest, Worker
from kvkeep_service.registry import Askable

router = APIRouter(prefix="/contexts", tags=["queries"])

_STREAM_EXAMPLE: Final = (
    'event: token\ndata: {"text":"On 31 March","index":0}\n\n'
    'event: done\ndata: {"id":"ans_01K9Z3V5J8Q6W2E4R7T1Y0N5PX","object":"answer"}\n\n'
)


@router.post(
    "/{context_id}/query",
    summary="Ask a question",
    response_model=AnswerView,
    dependencies=[Depends(json_only), Depends(only_parameters("wait"))],
    responses={
        200: {
            "description": "The answer; with `stream`, `token` events and one `done` with it."
            " A failure after the first event is one `error` event with its problem.",
            "content": {"text/event-stream": {"example": _STREAM_EXAMPLE}},
        },
        **responses(
            *COMMON,
            *BODY,
            "template_changes_prefix",
            "question_too_long",
            "context_not_found",
            "context_expired",
            "context_not_ready",
            "context_failed",
            "context_model_mismatch",
            "overloaded",
            "worker_unavailable",
            "storage_unavailable",
        ),
    },
)
async def query_context(
    context_id: ContextId,
    body: Query,
    request: Request,
    tenant: Tenant,
    registry: TheRegistry,
    worker: TheWorker,
    metrics: TheMetrics,
    wait: Wait = None,
) -> Response:
    """Ask one question about a document; the answer comes whole or, with `stream`, in events.

    A context that is not ready answers 409, after `wait` seconds at most. Going away stops it.
    """
    question = body.asked()
    if body.ratio is not None:
        check_ratio("ratio", body.ratio, allow_lossy=body.allow_lossy)
    if body.min_ratio is not None:
        check_ratio("min_ratio", body.min_ratio, allow_lossy=body.allow_lossy)
    deadline = time.monotonic() + seconds_to_wait(wait, body.wait)
    while True:
        seconds = deadline - time.monotonic()
        if seconds > 0:
            waiting = registry.until_askable(tenant, context_id, seconds)
            await while_connected(request.receive, waiting)
        askable = await registry.open_query(tenant, context_id, body.ratio, body.min_ratio)
        asked = _request(tenant, context_id, askable, question, body)
        try:
            if body.stream:
                return await start_stream(_stream(worker, metrics, asked), request)
            answer = await while_connected(request.receive, _collect(worker, asked))
            shown = _shown(worker, metrics, asked, answer)
            return Response(shown, media_type="application/json")
        except ContextNotReady:
            # Loading has shown the cache to be wrong, and it is being built again.
            if time.monotonic() >= deadline:
                raise


async def _collect(worker: Worker, asked: QueryRequest) -> AnswerEvent:
    async with aclosing(worker.query(asked)) as events:
        async for item in events:
            if isinstance(item, AnswerEvent):
                return item
    raise _ended_early()


async def _stream(
    worker: Worker, metrics: Metrics, asked: QueryRequest
) -> AsyncGenerator[bytes, None]:
    async with aclosing(worker.query(asked)) as events:
        async for item in events:
            if isinstance(item, AnswerEvent):
                yield event("done", _shown(worker, metrics, asked, item))
                return
            token = TokenView(text=item.text, index=item.index)
            yield event("token", token.model_dump_json())
    raise _ended_early()


def _ended_early() -> WorkerUnavailable:
    return WorkerUnavailable("the answer ended before its end")


def _request(
    tenant: str, context_id: str, askable: Askable, question: str, body: Query
) -> QueryRequest:
    return QueryRequest(
        tenant=tenant,
        context_id=context_id,
        cache_id=askable.cache_id,
        ratio=askable.ratio,
        question=question,
        min_ratio=body.min_ratio,
        system=body.system,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(body.stop),
        return_token_ids=body.return_token_ids,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _shown(worker: Worker, metrics: Metrics, asked: QueryRequest, answer: AnswerEvent) -> str:
    """Render a whole answer. Modifies: the metrics, which count it."""
    metrics.answered(answer)
    view = AnswerView.of(new_answer_id(), asked.context_id, worker.model.name, time.time(), answer)
    return view.to_json()
