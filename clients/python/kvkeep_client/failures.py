"""How the commands of ``kvkeep`` tell a failure: what it was, and what can be done about it."""

from kvkeep_client.errors import (
    APIError,
    ContextExpired,
    ContextFailed,
    ContextNotFound,
    KVKeepError,
    ServerUnreachable,
)
from kvkeep_client.terminal import called


def problem(error: KVKeepError) -> dict[str, object]:
    """The failure as the object that ``--json`` prints."""
    fields = {
        "code": error.code,
        "detail": error.detail,
        "status": error.status,
        "request_id": error.request_id,
    }
    if error.context_id is not None:
        fields["context_id"] = error.context_id
    return {**(error.facts if isinstance(error, APIError) else {}), **fields}


def told(error: KVKeepError) -> str:
    """The failure as a sentence, with a line for each thing to do."""
    return "\n".join((f"kvkeep: {error.detail}", *_advice(error)))


def going_on(context_id: str) -> str:
    """What to do about a context whose build nobody waits for any more."""
    kvkeep = called("kvkeep")
    return (
        "The document is registered, and its build goes on whenever the server runs:"
        f" {kvkeep} show {context_id} says how far it is, and {kvkeep} ask {context_id} QUESTION"
        " waits for it."
    )


def replacing(context_id: str) -> str:
    """What is so of a ready context while its cache is built again."""
    return (
        "building: it answers from the cache it has until the new one is there;"
        f" {called('kvkeep')} show {context_id} says how far that is"
    )


def _advice(error: KVKeepError) -> list[str]:
    lines = []
    match error:
        case ServerUnreachable():
            lines.append(
                f"Start one with: {called('kvkeep-server')} serve"
                " (or name another with --url or KVKEEP_URL)"
            )
        case ContextNotFound():
            lines.append(f"{called('kvkeep')} ls shows what there is.")
        case APIError(status=401):
            lines.append("Give the key with --api-key or KVKEEP_API_KEY.")
        case APIError(status=503):
            lines.append("Try again in a moment; the server is there, and its log says more.")
        case APIError(request_id=str() as request_id) if (error.status or 0) >= 500:
            lines.append(f"The server's log has it under request {request_id}.")
    match error:
        case ContextFailed(context_id=str() as context_id):
            lines.append(f"{called('kvkeep')} rebuild {context_id} builds it again.")
        case ContextExpired() | ContextNotFound():
            pass
        case KVKeepError(context_id=str() as context_id):
            lines.append(going_on(context_id))
    return lines
