"""What the routes share of a request: the registry, its checks, and the seconds to wait."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Query, Request

from kvkeep_service.api.refusals import UnsupportedMediaType
from kvkeep_service.api.strict import WAIT_SECONDS_MAX
from kvkeep_service.bounds import Bounds
from kvkeep_service.errors import InvalidEncoding, InvalidRequest
from kvkeep_service.metrics import Metrics
from kvkeep_service.ports import Worker
from kvkeep_service.registry import Registry


@dataclass(frozen=True, slots=True)
class Services:
    """What the routes work with; the application keeps one."""

    registry: Registry
    worker: Worker
    metrics: Metrics


def _registry(request: Request) -> Registry:
    services: Services = request.app.state.services
    return services.registry


def _metrics(request: Request) -> Metrics:
    services: Services = request.app.state.services
    return services.metrics


def _worker(request: Request) -> Worker:
    services: Services = request.app.state.services
    return services.worker


async def json_only(request: Request) -> None:
    """Refuse a body that is not declared as JSON, or not in UTF-8 (RFC 8259, section 8.1).

    Raises: UnsupportedMediaType; InvalidEncoding.
    """
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise UnsupportedMediaType(kind)
    # Python's parser would guess UTF-16 and UTF-32; in UTF-8 no JSON text begins like these.
    beginning = (await request.body())[:4]
    if b"\0" in beginning or beginning[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise InvalidEncoding("body", "JSON is sent in UTF-8")


async def no_body(request: Request) -> None:
    """Refuse what a route would ignore: it takes no options. An empty JSON object says nothing.

    Raises: InvalidRequest.
    """
    if (await request.body()).strip() not in (b"", b"{}"):
        raise InvalidRequest("body", "must be empty: there are no options here")


def only_parameters(*names: str, prefix: str | None = None) -> Callable[[Request], None]:
    """Make a dependency that refuses query parameters that the route does not know.

    With ``prefix``, all that begin so are known. It raises InvalidRequest, naming the parameter;
    also for one that is given twice.
    """

    def check(request: Request) -> None:
        for name in request.query_params:
            if name not in names and not (prefix is not None and name.startswith(prefix)):
                raise InvalidRequest(name[:100], "there is no such query parameter here")
            if len(request.query_params.getlist(name)) > 1:
                raise InvalidRequest(name[:100], "is given more than once")

    return check


def seconds_to_wait(parameter: float | None, field: float) -> float:
    """Take ``wait`` from the query string or the body.

    Raises: InvalidRequest, when both are given and differ.
    """
    if parameter is None:
        return field
    if field not in (0, parameter):
        raise InvalidRequest("wait", "differs between the query string and the body")
    return parameter


ContextId = Annotated[str, Path(description="Id of the context: `ctx_` and 26 characters.")]
TheRegistry = Annotated[Registry, Depends(_registry)]
TheMetrics = Annotated[Metrics, Depends(_metrics)]
TheWorker = Annotated[Worker, Depends(_worker)]
Wait = Annotated[
    Annotated[float, Bounds(0, WAIT_SECONDS_MAX)] | None,
    Query(
        allow_inf_nan=False,
        description="Most seconds to hold the request until the context is ready, 0 to 300.",
    ),
]
