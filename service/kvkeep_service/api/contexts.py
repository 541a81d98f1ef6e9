"""``/contexts``: register, look up, list, change, delete, follow."""

from collections.abc import AsyncGenerator
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import EventSourceResponse

from kvkeep_service.api.connection import while_connected
from kvkeep_service.api.errors import BODY, COMMON, RETRY_KEY, responses
from kvkeep_service.api.events import event, start_stream
from kvkeep_service.api.requests import (
    ContextId,
    TheRegistry,
    Wait,
    json_only,
    no_body,
    only_parameters,
    seconds_to_wait,
)
from kvkeep_service.api.schemas import ContextCreate, ContextPatch, expiry
from kvkeep_service.api.security import Tenant
from kvkeep_service.api.views import ContextList, ContextView, DocumentView
from kvkeep_service.bounds import Bounds
from kvkeep_service.errors import InvalidRequest
from kvkeep_service.ids import is_context_id
from kvkeep_service.registration import Answered, Registration
from kvkeep_service.registry import Changes, Filter, Registry
from kvkeep_storage.metadata import UNSET
from kvkeep_storage.records import UNFINISHED, ContextRecord, Status

RETRY_AFTER_SECONDS: Final = 2
# How often progress is looked at; the end is seen as soon as by any waiting request.
_PROGRESS_SECONDS: Final = 0.25
_METADATA: Final = "metadata."
_EVENTS_EXAMPLE: Final = (
    'event: progress\ndata: {"id":"ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PX","status":"building"}\n\n'
    'event: ready\ndata: {"id":"ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PX","status":"ready"}\n\n'
)

router = APIRouter(prefix="/contexts", tags=["contexts"])


@router.post(
    "",
    summary="Register a document",
    status_code=202,
    response_model=ContextView,
    dependencies=[Depends(json_only), Depends(only_parameters("wait"))],
    responses={
        200: {"model": ContextView, "description": "Ready at once: an equal cache is there."},
        **responses(
            *COMMON,
            *BODY,
            *RETRY_KEY,
            "empty_document",
            "document_too_long",
            "model_not_found",
            "head_scores_missing",
            "quota_exceeded",
            "storage_unavailable",
            "store_mismatch",
            "worker_unavailable",
            "storage_full",
        ),
    },
)
async def create_context(
    body: ContextCreate,
    request: Request,
    tenant: Tenant,
    registry: TheRegistry,
    wait: Wait = None,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            description="Makes a repeated request answer as the first did; 1 to 255 characters.",
        ),
    ] = None,
) -> Response:
    """Register a document. 202 while its cache is being built, 200 when it is ready.

    The same `Idempotency-Key` with the same body answers with the same context again.
    """
    seconds = seconds_to_wait(wait, body.wait)
    wanted = Registration(
        document=body.document_spec(),
        compression=body.compression.spec(),
        name=body.name,
        metadata=body.metadata,
        model=body.model,
        expires=(
            registry.default_expiry
            if "expires_after" not in body.model_fields_set
            else expiry(body.expires_after)
        ),
    )

    async def answer() -> Answered:
        return _answered(await registry.register(tenant, wanted))

    answered = await registry.once(tenant, idempotency_key, await request.body(), answer)
    if seconds and answered.status == 202:
        # Waiting is no part of what is kept: a repeated request waits for the same context.
        context_id = ContextView.model_validate_json(answered.body).id
        finished = registry.finished(tenant, context_id, seconds)
        answered = _answered(await while_connected(request.receive, finished))
    return _response(answered)


# Not in the description: there is nothing to call, only a reason to give.
@router.post("/upload", include_in_schema=False)
async def upload_context() -> Response:
    """Upload a file. Not supported by this version: send its text to `POST /contexts`."""
    raise InvalidRequest("file", "uploads are not supported by this version; send document")


@router.get(
    "",
    summary="List contexts",
    response_model=ContextList,
    dependencies=[Depends(only_parameters("limit", "after", "order", "status", prefix=_METADATA))],
    responses=responses(*COMMON),
    openapi_extra={
        "parameters": [
            {
                "name": "metadata.KEY",
                "in": "query",
                "description": "Only contexts whose metadata has this value under KEY.",
                "schema": {"type": "string"},
            }
        ]
    },
)
async def list_contexts(
    request: Request,
    tenant: Tenant,
    registry: TheRegistry,
    limit: Annotated[
        Annotated[int, Bounds(1, 100)], Query(description="Contexts per page, 1 to 100.")
    ] = 20,
    after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By time of creation.")] = "desc",
    status: Annotated[Status | None, Query(description="Only contexts in this status.")] = None,
) -> ContextList:
    """List contexts page by page, newest first; `last_id` is the next page's `after`."""
    if after is not None and not is_context_id(after):
        raise InvalidRequest("after", "is not the id of a context")
    metadata = {
        name.removeprefix(_METADATA): value
        for name, value in request.query_params.items()
        if name.startswith(_METADATA)
    }
    wanted = Filter(limit, after, order == "desc", status, metadata)
    return ContextList.of(await registry.contexts(tenant, wanted))


@router.get(
    "/{context_id}",
    summary="Look up a context",
    response_model=ContextView,
    dependencies=[Depends(only_parameters())],
    responses=responses(*COMMON, "context_not_found", "context_expired"),
)
async def get_context(context_id: ContextId, tenant: Tenant, registry: TheRegistry) -> Response:
    """Show a context: its status, the progress of its build, and its lengths and sizes."""
    record = await registry.context(tenant, context_id)
    return _response(Answered(200, _body(record), _retry_after(record)))


@router.patch(
    "/{context_id}",
    summary="Change name, metadata or expiry",
    response_model=ContextView,
    dependencies=[Depends(json_only), Depends(only_parameters())],
    responses=responses(
        *COMMON,
        *BODY,
        "context_not_found",
        "context_expired",
        "storage_unavailable",
        "store_mismatch",
        "storage_full",
    ),
)
async def change_context(
    context_id: ContextId, body: ContextPatch, tenant: Tenant, registry: TheRegistry
) -> ContextView:
    """Change what is sent and leave the rest; metadata is replaced as a whole."""
    given = body.model_fields_set
    changes = Changes(
        name=body.name if "name" in given else UNSET,
        metadata=body.metadata if "metadata" in given else UNSET,
        expires=expiry(body.expires_after) if "expires_after" in given else UNSET,
    )
    return ContextView.of(await registry.change(tenant, context_id, changes))


@router.delete(
    "/{context_id}",
    summary="Delete a context",
    status_code=204,
    response_class=Response,
    dependencies=[Depends(only_parameters())],
    responses=responses(*COMMON, "context_not_found", "storage_unavailable"),
)
async def delete_context(context_id: ContextId, tenant: Tenant, registry: TheRegistry) -> Response:
    """Delete a context, its document, and its cache when no other context shares it.

    Deleting what is deleted is no error.
    """
    await registry.delete(tenant, context_id)
    return Response(status_code=204)


@router.post(
    "/{context_id}/rebuild",
    summary="Build a context again",
    status_code=202,
    response_model=ContextView,
    dependencies=[Depends(no_body), Depends(only_parameters())],
    responses=responses(
        *COMMON,
        "body_too_large",
        "context_not_found",
        "context_expired",
        "context_model_mismatch",
        "build_mismatch",
        "document_too_long",
        "document_corrupt",
        "cache_incompatible",
        "quota_exceeded",
        "storage_unavailable",
        "store_mismatch",
        "storage_full",
    ),
)
async def rebuild_context(context_id: ContextId, tenant: Tenant, registry: TheRegistry) -> Response:
    """Queue a new build of the cache, after a failure or to replace what is stored.

    A ready context goes on answering from its present cache until the new one is there, and
    keeps it when the new build fails. Where a build would make another cache than the one that was
    registered (other weights, another dtype, head scores of another calibration), the answer is
    `409 build_mismatch`: it says what differs, and in `other_builders` how many servers may differ.
    """
    record = await registry.rebuild(tenant, context_id)
    return _response(Answered(202, _body(record), _retry_after(record)))


@router.post(
    "/{context_id}/prefetch",
    summary="Load a context now",
    status_code=202,
    response_model=ContextView,
    dependencies=[Depends(no_body), Depends(only_parameters())],
    responses=responses(
        *COMMON,
        "body_too_large",
        "context_not_found",
        "context_expired",
        "context_not_ready",
        "context_failed",
        "context_model_mismatch",
        "overloaded",
    ),
)
async def prefetch_context(
    context_id: ContextId, tenant: Tenant, registry: TheRegistry
) -> Response:
    """Begin to load the cache of a context, so that its next question finds it in memory.

    A hint: it displaces nothing that is in use or took longer to bring, and when it cannot be
    loaded, nobody is told before the next question.
    """
    return _response(Answered(202, _body(await registry.prefetch(tenant, context_id)), {}))


@router.get(
    "/{context_id}/document",
    summary="Read the document back",
    response_model=DocumentView,
    dependencies=[Depends(only_parameters())],
    responses=responses(
        *COMMON, "context_not_found", "context_expired", "document_corrupt", "storage_unavailable"
    ),
)
async def get_document(
    context_id: ContextId, tenant: Tenant, registry: TheRegistry
) -> DocumentView:
    """Show the text as the model read it; several documents are one text here."""
    return DocumentView.of(context_id, await registry.document(tenant, context_id))


@router.get(
    "/{context_id}/events",
    summary="Follow a build",
    # Not its response class: FastAPI would take the route for a generator, and a context that
    # is not there would be answered 200.
    response_class=Response,
    dependencies=[Depends(only_parameters())],
    responses={
        200: {
            "description": "`progress` events, then one `ready` or `failed` with the context.",
            "content": {EventSourceResponse.media_type: {"example": _EVENTS_EXAMPLE}},
        },
        **responses(*COMMON, "context_not_found", "context_expired"),
    },
)
async def follow_context(
    context_id: ContextId, request: Request, tenant: Tenant, registry: TheRegistry
) -> Response:
    """Follow a build: `progress` events, then one `ready` or `failed`; the context in each."""
    return await start_stream(_events(registry, tenant, context_id), request)


async def _events(registry: Registry, tenant: str, context_id: str) -> AsyncGenerator[bytes, None]:
    shown: tuple[Status, str | None, float] | None = None
    record = await registry.context(tenant, context_id)
    while record.status in UNFINISHED:
        state = (record.status, record.stage, record.fraction)
        if state != shown:
            yield event("progress", ContextView.of(record).model_dump_json())
            shown = state
        record = await registry.finished(tenant, context_id, _PROGRESS_SECONDS)
    yield event(record.status, ContextView.of(record).model_dump_json())


def _answered(record: ContextRecord) -> Answered:
    headers = {"Location": f"/contexts/{record.id}", **_retry_after(record)}
    return Answered(202 if record.status in UNFINISHED else 200, _body(record), headers)


def _body(record: ContextRecord) -> bytes:
    return ContextView.of(record).model_dump_json().encode()


def _retry_after(record: ContextRecord) -> dict[str, str]:
    return {"Retry-After": str(RETRY_AFTER_SECONDS)} if record.status in UNFINISHED else {}


def _response(answered: Answered) -> Response:
    return Response(
        answered.body, answered.status, dict(answered.headers), media_type="application/json"
    )
