"""One function per request of the API: its method, path, query and body, and nothing sent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict, Unpack
from urllib.parse import quote

from kvkeep_client.models import UNSET, ExpiresAfter, Unset
from kvkeep_client.sendable import (
    asked_fields,
    expiry_fields,
    header_text,
    list_of_texts,
    mapping,
    plain,
    span_fields,
    url_text,
)

Order = Literal["asc", "desc"]
Policy = Literal[
    "kvzip", "kvzip_head", "snapkv", "expected_attention", "streaming", "random", "none"
]


@dataclass(frozen=True, slots=True)
class Call:
    """A request that may be sent several times with the same effect as once."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


class CreateOptions(TypedDict, total=False):
    """What may be said about a context besides its document.

    ``policy`` picks what stays. ``ratio`` is the fraction of the KV cache to keep; below 0.15 only
    with ``allow_lossy``. With "auto" it is the smallest stored one that loses at most ``max_loss``
    nats per token. ``tokens`` is, instead, how many tokens each head keeps on average.
    ``normalization`` is what scores are multiplied by. ``neighbours``, 0 to 4, are the chunks that
    local scoring sees on each side of the one it scores. ``remainder`` False leaves out the rows
    that stand for evicted ones.
    ``quantization`` is what numbers that are kept become: 8 bits, 4, or "none" what they were.
    ``protect`` has half-open character spans of the document that are never evicted.
    ``expires_after`` None means never; left out, the server's default holds.
    """

    name: str | None
    metadata: Mapping[str, str]
    system: str | None
    instructions: str | None
    protect: Sequence[tuple[int, int]]
    ratio: float | Literal["auto"] | None
    max_loss: float | None
    tokens: int | None
    policy: Policy
    scoring: Literal["auto", "exact", "local"]
    allow_lossy: bool
    quantization: Literal["none", "int8", "int4", "fp8"]
    normalization: Literal["none", "kvzip_plus"]
    neighbours: int
    remainder: bool
    expires_after: ExpiresAfter | None


class QueryOptions(TypedDict, total=False):
    """What may be said about one question; left out, the server's defaults hold.

    ``ratio`` is one of the context's ``ratios_available``, below 0.15 only with ``allow_lossy``;
    with ``min_ratio``, another of them, less will do where that much is not in memory yet, and
    the answer's ``ratio`` says how much it was. ``temperature`` 0 is greedy. ``top_logprobs``, up
    to 20, needs ``logprobs``.
    """

    system: str | None
    ratio: float | None
    min_ratio: float | None
    allow_lossy: bool
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: Sequence[str]
    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    chat_template_kwargs: Mapping[str, object]


class Message(TypedDict):
    """A turn of a conversation. "system" only stands before all others."""

    role: Literal["system", "user", "assistant"]
    content: str


Asked: TypeAlias = str | Sequence[Message]
"""A question, or a conversation that ends with one."""


@dataclass(frozen=True, slots=True)
class Continued:
    """An answer to go on from; with ``fork`` it can be continued once more."""

    answer_id: str
    fork: bool = False


_COMPRESSION = (
    "ratio",
    "max_loss",
    "tokens",
    "policy",
    "scoring",
    "allow_lossy",
    "quantization",
    "normalization",
    "neighbours",
    "remainder",
)
# Options that the API has in another form.
_SHAPED = ("protect", "expires_after")


def create_context(
    document: str, *, idempotency_key: str, **options: Unpack[CreateOptions]
) -> Call:
    """Register a document; the key makes a repeated request answer as the first one did.

    Raises: TypeError, ValueError, naming the option; so does every call with a body.
    """
    fields = {name: value for name, value in options.items() if name not in _SHAPED}
    body: dict[str, object] = {
        name: plain(value, name) for name, value in {"document": document, **fields}.items()
    }
    compression = {name: body.pop(name) for name in _COMPRESSION if name in body}
    if compression:
        body["compression"] = compression
    if "protect" in options:
        body["protect"] = span_fields(options["protect"])
    if "expires_after" in options:
        body["expires_after"] = expiry_fields(options["expires_after"])
    key = header_text(idempotency_key, "idempotency_key")
    return _with_body("POST", "/contexts", body, {"Idempotency-Key": key})


def get_context(context_id: str) -> Call:
    """Read one context."""
    return Call("GET", _path(context_id))


def list_contexts(
    *,
    limit: int,
    after: str | None,
    order: Order,
    status: str | None,
    metadata: Mapping[str, str],
) -> Call:
    """Read one page of contexts: those after the id ``after`` in ``order`` of creation."""
    params = {"limit": str(limit), "order": url_text(order, "order")}
    for key, value in mapping(metadata, "metadata").items():
        params[url_text(f"metadata.{key}", "metadata")] = url_text(str(value), f"metadata.{key}")
    if after is not None:
        params["after"] = after
    if status is not None:
        params["status"] = url_text(status, "status")
    return Call("GET", "/contexts", params)


def update_context(
    context_id: str,
    *,
    name: str | Unset | None,
    metadata: Mapping[str, str] | Unset,
    expires_after: ExpiresAfter | Unset | None,
) -> Call:
    """Change what is not UNSET."""
    body: dict[str, object] = {}
    if name is not UNSET:
        body["name"] = plain(name, "name")
    if metadata is not UNSET:
        body["metadata"] = mapping(metadata, "metadata")
    if expires_after is not UNSET:
        body["expires_after"] = expiry_fields(expires_after)
    return _with_body("PATCH", _path(context_id), body)


def delete_context(context_id: str) -> Call:
    """Delete one context; an unknown one is no error."""
    return Call("DELETE", _path(context_id))


def rebuild_context(context_id: str) -> Call:
    """Queue a new build of a context's cache; one that waits already is left as it is."""
    return Call("POST", _path(context_id, "/rebuild"))


def prefetch_context(context_id: str) -> Call:
    """Have a context loaded before it is asked."""
    return Call("POST", _path(context_id, "/prefetch"))


def get_document(context_id: str) -> Call:
    """Read the registered document and what surrounds it in the prompt."""
    return Call("GET", _path(context_id, "/document"))


def watch_context(context_id: str) -> Call:
    """Follow a build as server-sent events."""
    return Call("GET", _path(context_id, "/events"))


def query(
    context_id: str,
    asked: Asked,
    *,
    stream: bool,
    continued: Continued | None = None,
    **options: Unpack[QueryOptions],
) -> Call:
    """Ask one question; answered as one object, or as server-sent events."""
    body = {**asked_fields(asked), "stream": stream, **_plain_options(options)}
    if continued is not None:
        body |= {"session": continued.answer_id, "fork": continued.fork}
    return _with_body("POST", _path(context_id, "/query"), body)


def query_many(context_id: str, questions: Sequence[str], **options: Unpack[QueryOptions]) -> Call:
    """Ask several questions at once; answered as a list."""
    body = {"questions": list_of_texts(questions), **_plain_options(options)}
    return _with_body("POST", _path(context_id, "/query"), body)


def _plain_options(options: QueryOptions) -> dict[str, object]:
    return {name: plain(value, name) for name, value in options.items()}


def _path(context_id: str, rest: str = "") -> str:
    if not isinstance(context_id, str):
        raise TypeError(f"a context id is a text, not {type(context_id).__name__}")
    if not context_id:
        raise ValueError("a context id is needed, not an empty string")
    return f"/contexts/{quote(url_text(context_id, 'context_id'), safe='')}{rest}"


def _with_body(
    method: str, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None
) -> Call:
    # A lone surrogate goes out as it is: the server refuses it with a typed error.
    encoded = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return Call(
        method,
        path,
        headers={"Content-Type": "application/json", **(headers or {})},
        body=encoded.encode("utf-8", errors="surrogatepass"),
    )
