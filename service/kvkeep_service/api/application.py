"""The HTTP application: routes, middleware and error handlers put together; it owns nothing."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from kvkeep_service.api import contexts, errors, health, queries
from kvkeep_service.api import metrics as metrics_routes
from kvkeep_service.api.envelope import Envelope
from kvkeep_service.api.requests import Services
from kvkeep_service.api.security import Gate
from kvkeep_service.config import Settings
from kvkeep_service.ids import new_request_id
from kvkeep_service.metrics import Metrics
from kvkeep_service.ports import Worker
from kvkeep_service.registry import Registry

_DESCRIPTION = """\
Read a long document once, keep its compressed KV cache, and ask questions about it.

Register a document with `POST /contexts`, then ask with `POST /contexts/{id}/query`. Every error
is an `application/problem+json` with a stable `code`, which `docs/errors.md` explains; every
response has an `X-Request-Id`. A server with a key wants it in every request: "Authorize" takes it.
"""


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Describe the API, with the one schema that all failures refer to."""
        if not self.openapi_schema:
            described = super().openapi()
            problem = errors.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas = described.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(problem.pop("$defs"))
            schemas["Problem"] = problem
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        return super().openapi()


def build_application(
    registry: Registry, worker: Worker, metrics: Metrics, settings: Settings
) -> FastAPI:
    """Build the application from what the composition root has opened, and will close.

    `config.Settings` has checked that an open host has a key.
    """
    key = settings.api_key
    app = _Application(
        title="kvkeep",
        version=version("kvkeep"),
        description=_DESCRIPTION,
        # A redirect would make clients send a large body twice, or lose it.
        redirect_slashes=False,
        middleware=[
            Middleware(
                Envelope, body_limit_bytes=settings.body_limit_bytes, make_id=new_request_id
            ),
            Middleware(Gate, api_key=None if key is None else key.get_secret_value()),
        ],
    )
    app.state.services = Services(registry, worker, metrics)
    errors.install(app)
    for router in (contexts.router, queries.router, health.router, metrics_routes.router):
        app.include_router(router)
    return app
