"""Who asks: the bearer key, checked before a byte of the body is read, and its tenant."""

import hashlib
import hmac
from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkeep_service.api.errors import failure_of
from kvkeep_service.api.refusals import Forbidden, Unauthenticated
from kvkeep_service.config import is_loopback
from kvkeep_service.errors import ServiceError

DEFAULT_TENANT: Final = "default"

_REBOUND: Final = (
    "without a key this server answers to loopback names only (localhost, 127.0.0.1, [::1]);"
    " set KVKEEP_API_KEY to call it by another"
)

_scheme = HTTPBearer(
    auto_error=False,
    description="The server's key (KVKEEP_API_KEY); one without a key asks for none.",
)


class Gate:
    """Middleware that lets a request in and says whose it is.

    With a key, every path but ``/health/…`` asks for it. Without one, whoever reaches the
    server may use it; `config.Settings` allows that on loopback hosts only, and the server must
    also be called by a loopback name: a web page whose own name was made to point here
    (DNS rebinding) calls it by that name.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        """Keep only the digest of the key, for comparisons in constant time."""
        self._app = app
        self._digest = None if api_key is None else _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 401 or 403."""
        if scope["type"] == "http":
            refusal = self._refusal(scope["path"], Headers(scope=scope))
            if refusal is not None:
                failure = failure_of(refusal)
                response = failure.response(scope["path"], scope["state"]["request_id"])
                await response(scope, receive, send)
                return
            scope["state"]["tenant"] = DEFAULT_TENANT
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ServiceError | None:
        if _is_health(path):
            return None
        if self._digest is None:
            return None if _names_this_machine(headers.get("host", "")) else Forbidden(_REBOUND)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_known = hmac.compare_digest(_digest(key), self._digest)
        return None if scheme.lower() == "bearer" and is_known else Unauthenticated()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is a loopback name; a client of HTTP/1.0 may send none."""
    try:
        return not host or is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _is_health(path: str) -> bool:
    return path.startswith("/health/")


def _tenant(request: Request, _credentials: Annotated[object, Depends(_scheme)]) -> str:
    # The gate has decided; the scheme stands here so that OpenAPI tells clients about it.
    tenant: str = request.state.tenant
    return tenant


Tenant = Annotated[str, Depends(_tenant)]
