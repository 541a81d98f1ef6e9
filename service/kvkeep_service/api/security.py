"""Who asks: the bearer key, checked before a byte of the body is read, and its tenant."""

import hashlib
import hmac
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkeep_service.api.errors import failure_of
from kvkeep_service.errors import Unauthenticated

DEFAULT_TENANT: Final = "default"

_scheme = HTTPBearer(auto_error=False, description="The server's key, when it has one.")


class Gate:
    """Middleware that lets a request in and says whose it is.

    With a key, every path but ``/health/…`` asks for it. Without one, whoever reaches the
    server may use it; `config.Settings` allows that on loopback hosts only.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        """Keep only the digest of the key, for comparisons in constant time."""
        self._app = app
        self._digest = None if api_key is None else _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 401."""
        if scope["type"] == "http":
            if not (_is_health(scope["path"]) or self._admits(Headers(scope=scope))):
                failure = failure_of(Unauthenticated())
                response = failure.response(scope["path"], scope["state"]["request_id"])
                await response(scope, receive, send)
                return
            scope["state"]["tenant"] = DEFAULT_TENANT
        await self._app(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        if self._digest is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(key), self._digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_health(path: str) -> bool:
    return path.startswith("/health/")


def _tenant(request: Request, _credentials: Annotated[object, Depends(_scheme)]) -> str:
    # The gate has decided; the scheme stands here so that OpenAPI tells clients about it.
    tenant: str = request.state.tenant
    return tenant


Tenant = Annotated[str, Depends(_tenant)]
