"""``GET /metrics``: counts of this process for Prometheus; behind the key, like any other route."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from kvkeep_service.api.errors import responses
from kvkeep_service.api.requests import TheMetrics
from kvkeep_service.api.security import Tenant

router = APIRouter(tags=["operations"])


@router.get(
    "/metrics",
    summary="Show counts for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"example": "kvkeep_resident_bytes 1.048576e+06\n"}},
        },
        **responses("unauthenticated", "forbidden"),
    },
)
async def show_metrics(_tenant: Tenant, metrics: TheMetrics) -> Response:
    """Show gauges as of now and counters since the start; the documentation lists them."""
    return Response(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
