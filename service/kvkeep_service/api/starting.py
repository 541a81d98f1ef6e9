"""What is answered while the model is being loaded: that it lives, and is not ready yet."""

from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkeep_service.api.envelope import Envelope
from kvkeep_service.api.errors import failure_of
from kvkeep_service.api.operation_views import HealthView
from kvkeep_service.errors import WorkerUnavailable
from kvkeep_service.ids import new_request_id

_LIVE: Final = HealthView(status="ok", checks={})
_NOT_READY: Final = HealthView(status="unavailable", checks={"worker": "unavailable"})


def starting_application(body_limit_bytes: int) -> ASGIApp:
    """An application without stores or model; every route but health's is ``503``.

    It asks for no key: nothing that one would protect is said.
    """
    return Envelope(_answer, body_limit_bytes, new_request_id)


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    path, media_type = scope["path"], "application/json"
    if path == "/health/live":
        response = Response(_LIVE.model_dump_json(), media_type=media_type)
    elif path == "/health/ready":
        response = Response(_NOT_READY.model_dump_json(), 503, media_type=media_type)
    else:
        failure = failure_of(WorkerUnavailable("its model is being loaded"))
        response = failure.response(path, scope["state"]["request_id"])
    await response(scope, receive, send)
