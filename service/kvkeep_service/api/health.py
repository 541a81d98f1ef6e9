"""Whether it lives, whether it can take requests, and what exactly runs here."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from fastapi import APIRouter, Response

from kvkeep_service.api.errors import responses
from kvkeep_service.api.operation_views import HealthView, ModelList, ModelView, VersionView
from kvkeep_service.api.requests import TheRegistry, TheWorker
from kvkeep_service.api.security import Tenant

router = APIRouter(tags=["operations"])

# Their versions decide what an answer may look like. Read from metadata: nothing is imported.
_PACKAGES: Final = ("torch", "transformers", "tokenizers", "safetensors", "fastapi")


@router.get("/health/live", summary="Is the process alive?")
async def live() -> HealthView:
    """Answer as long as the process serves requests at all."""
    return HealthView(status="ok", checks={})


@router.get(
    "/health/ready",
    summary="Can requests be served?",
    responses={503: {"model": HealthView, "description": "Something a request needs is away."}},
)
async def ready(response: Response, registry: TheRegistry) -> HealthView:
    """Check the worker and both stores; 503 when one is away. `degraded` still answers 200."""
    checks = await registry.health()
    states = set(checks.values())
    if "unavailable" in states:
        response.status_code = 503
        return HealthView(status="unavailable", checks=checks)
    return HealthView(status="degraded" if "degraded" in states else "ok", checks=checks)


@router.get(
    "/version", summary="Show what runs here", responses=responses("unauthenticated", "forbidden")
)
async def show_version(_tenant: Tenant, worker: TheWorker) -> VersionView:
    """Show versions, model, device and kernels, with everything "auto" resolved."""
    model = worker.model
    return VersionView(
        version=_version("kvkeep") or "unknown",
        model=model.name,
        architecture=model.architecture,
        device=model.device,
        dtype=model.dtype,
        max_document_tokens=model.max_document_tokens,
        kernels=f"{model.kernels.backend} ({model.kernels.reason})",
        weights_digest=model.weights_digest,
        packages={name: found for name in _PACKAGES if (found := _version(name))},
    )


@router.get(
    "/v1/models", summary="List the models", responses=responses("unauthenticated", "forbidden")
)
async def list_models(_tenant: Tenant, worker: TheWorker) -> ModelList:
    """List the one model that is served, as the OpenAI API lists models."""
    return ModelList(data=[ModelView(id=worker.model.name)])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
