"""``POST /contexts/{id}/query``: questions and their answers, whole or as they are written.

A client that goes away stops its generation: the worker's iterator is closed whatever ends the
request.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from fastapi import APIRouter, Depends, Request, Response

from kvkeep_service.api.answer_views import AnswerList, AnswerView, TokenView
from kvkeep_service.api.connection import while_connected
from kvkeep_service.api.errors import BODY, COMMON, responses
from kvkeep_service.api.events import event, start_stream
from kvkeep_service.api.query_schemas import Asked, Query
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
from kvkeep_service.api.security import Tenant
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
    response_model=AnswerView | AnswerList,
    dependencies=[Depends(json_only), Depends(only_parameters("wait"))],
    responses={
        200: {
            "description": "The answer, or with `questions` the list of answers; with `stream`,"
            " `token` events and one `done` with that."
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
            "session_gone",
            "context_not_ready",
            "context_failed",
            "context_model_mismatch",
            "answer_failed",
            "logits_not_finite",
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
    """Ask about a document: one question, several at once, or the next of a conversation.

    The answer comes whole or, with `stream`, in events. A context that is not ready answers 409,
    after `wait` seconds at most. Going away stops it. Several questions fail together.
    """
    questions = body.asked()
    deadline = time.monotonic() + seconds_to_wait(wait, body.wait)
    while True:
        seconds = deadline - time.monotonic()
        if seconds > 0:
            waiting = registry.until_askable(tenant, context_id, seconds)
            await while_connected(request.receive, waiting)
        askable = await registry.open_query(tenant, context_id, body.ratio, body.min_ratio)
        requests = [_request(tenant, context_id, askable, asked, body) for asked in questions]
        answering = _Answering(worker, metrics, requests, is_list=body.questions is not None)
        try:
            if body.stream:
                return await start_stream(answering.stream(), request)
            shown = await while_connected(request.receive, answering.whole())
            return Response(shown, media_type="application/json")
        except ContextNotReady:
            # Loading has shown the cache to be wrong, and it is being built again.
            if time.monotonic() >= deadline:
                raise


class _Answering:
    """What was asked in one request, while it is answered."""

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        requests: Sequence[QueryRequest],
        *,
        is_list: bool,
    ) -> None:
        """``is_list``: whether a list comes back, which one question makes a list of one."""
        self._worker = worker
        self._metrics = metrics
        self._requests = requests
        self._is_list = is_list
        self._answers: dict[int, AnswerView] = {}

    async def whole(self) -> str:
        """Everything, as JSON."""
        async with aclosing(self._worker.query(*self._requests)) as events:
            async for item in events:
                if isinstance(item, AnswerEvent):
                    self._take(item)
        return self._shown()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Pieces as events, and everything in the last one."""
        async with aclosing(self._worker.query(*self._requests)) as events:
            async for item in events:
                if isinstance(item, AnswerEvent):
                    self._take(item)
                    continue
                number = item.question if self._is_list else None
                token = TokenView(text=item.text, index=item.index, question=number)
                yield event("token", token.to_json())
        yield event("done", self._shown())

    def _take(self, answer: AnswerEvent) -> None:
        self._metrics.answered(answer)
        asked = self._requests[answer.question]
        assert asked.answer_id is not None
        self._answers[answer.question] = AnswerView.of(
            asked.answer_id, asked.context_id, self._worker.model.name, time.time(), answer
        )

    def _shown(self) -> str:
        if len(self._answers) < len(self._requests):
            raise WorkerUnavailable("the answer ended before its end")
        answers = [self._answers[number] for number in range(len(self._requests))]
        return AnswerList(data=answers).to_json() if self._is_list else answers[0].to_json()


def _request(
    tenant: str, context_id: str, askable: Askable, asked: Asked, body: Query
) -> QueryRequest:
    return QueryRequest(
        tenant=tenant,
        context_id=context_id,
        cache_id=askable.cache_id,
        ratio=askable.ratio,
        question=asked.question,
        min_ratio=body.min_ratio,
        system=asked.system,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(body.stop),
        return_token_ids=body.return_token_ids,
        chat_template_kwargs=body.chat_template_kwargs,
        history=asked.history,
        answer_id=new_answer_id(),
        session=body.session,
        fork=body.fork,
        top_logprobs=body.top_logprobs if body.logprobs else None,
    )
