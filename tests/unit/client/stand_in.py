"""A server that speaks the contract over real HTTP and answers from memory.

It can be told to fail, to break off and to be slow, which a real server cannot. That it speaks
as the real one does is checked in ``tests/contract/test_client_contract.py``.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

JSON = dict[str, Any]
Headers = Mapping[str, str]


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    params: list[tuple[str, str]]
    headers: Headers
    body: JSON | None


def problem(
    status: int, code: str, *, headers: Headers | None = None, detail: str = "", **facts: object
) -> Response:
    body = problem_body(status, code, detail=detail, **facts)
    return JSONResponse(body, status, headers=headers, media_type="application/problem+json")


def problem_body(status: int, code: str, *, detail: str = "", **facts: object) -> JSON:
    return {
        "type": f"urn:kvkeep:error:{code}",
        "title": code,
        "status": status,
        "detail": detail or f"about {code}",
        "instance": "/contexts",
        "code": code,
        "request_id": "req_of_the_body",
        **facts,
    }


def context_object(number: int, body: JSON) -> JSON:
    tokens = len(str(body.get("document", "")).split())
    compression = body.get("compression", {})
    return {
        "id": f"ctx_01J{number:023d}",
        "object": "context",
        "name": body.get("name"),
        "metadata": body.get("metadata", {}),
        "model": "stand-in",
        "status": "queued",
        "progress": {"stage": "queued", "fraction": 0.0},
        "created_at": "2026-11-29T15:12:07.123Z",
        "ready_at": None,
        "last_used_at": None,
        "expires_at": None,
        "tokens": {"document": tokens, "protected": 3, "total": tokens + 3},
        "compression": {
            "policy": "kvzip",
            "policy_applied": "kvzip",
            "ratio": _ratio(compression.get("ratio")),
            "max_loss": compression.get("max_loss"),
            "tokens": compression.get("tokens"),
            "ratio_achieved": None,
            "ratios_available": [0.15, 0.3],
            "scoring": "local",
            "quantization": "none",
            "remainder": True,
            "full_bytes": 4096 * (tokens + 3),
            "stored_bytes": None,
        },
        "fidelity": None,
        "timings": {},
        "queries": 0,
        "error": None,
    }


def _ratio(asked: object) -> object:
    return None if asked == "auto" else asked or 0.3


def logprobs_object() -> list[JSON]:
    return [
        {
            "token": "On",
            "token_id": 4,
            "logprob": -0.25,
            "top_logprobs": [{"token": "At", "token_id": 7, "logprob": -0.125}],
        }
    ]


def answer_object(context_id: str, text: str, *, number: int = 1) -> JSON:
    return {
        "id": f"ans_01J{number:023d}",
        "object": "answer",
        "context_id": context_id,
        "model": "stand-in",
        "created_at": "2026-11-29T15:12:09.500Z",
        "answer": text,
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 48,
            "completion_tokens": 5,
            "total_tokens": 53,
            "prompt_tokens_details": {"cached_tokens": 40},
        },
        "timings": {
            "queue_ms": 1.0,
            "load_ms": 84.25,
            "source": "store",
            "prefill_ms": 31.0,
            "ttft_ms": 117.0,
            "decode_tps": 71.3,
        },
        "ratio": 0.3,
    }


def sse(name: str, data: object) -> bytes:
    text = json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode()


@dataclass
class StandIn:
    """What the server holds, what it was asked, and what it is to do wrong."""

    api_key: str | None = None
    contexts: dict[str, JSON] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    planned: list[Response] = field(default_factory=list)
    """Answers given before any other, one per request."""
    pieces: list[str] = field(default_factory=lambda: ["On ", "31 March", " 2029."])
    stages: list[tuple[str, float]] = field(
        default_factory=lambda: [("prefill", 0.5), ("scoring", 0.25), ("storing", 1.0)]
    )
    ends_as: str = "ready"
    """The status a build ends in; "building" leaves it unfinished and breaks the stream off,
    "forever" never ends it."""
    planned_after: dict[str, list[Response]] = field(default_factory=dict)
    """Answers planned once a request to a path that ends so has been answered."""
    is_building: threading.Event = field(default_factory=threading.Event)
    stream_ends_with: str = "done"
    """done, error, silence or break; or forever, which ends only when the client hangs up."""
    hung_up: threading.Event = field(default_factory=threading.Event)
    keys: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    """Answers that can be continued."""
    kept_ever: list[str] = field(default_factory=list)

    def finish(self, context_id: str, status: str) -> None:
        """End a build."""
        context = self.contexts[context_id]
        context["status"], context["progress"] = status, None
        if status == "ready":
            context["ready_at"] = "2026-11-29T15:12:12.000Z"
            context["compression"]["ratio_achieved"] = 0.3
            context["compression"]["stored_bytes"] = 2048
            context["timings"] = {"prefill_s": 4.2}
        if status == "failed":
            context["error"] = {"code": "internal", "detail": "the worker died three times"}

    def calls(self, method: str) -> list[Seen]:
        """Return the requests seen with a method."""
        return [request for request in self.seen if request.method == method]

    def app(self) -> FastAPI:
        """Return the application."""
        app = FastAPI()
        app.add_api_route("/{path:path}", self._answer, methods=["GET", "POST", "PATCH", "DELETE"])
        return app

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw) if raw else None
        headers, params = dict(request.headers), request.query_params.multi_items()
        self.seen.append(Seen(request.method, request.url.path, params, headers, body))
        response = self.planned.pop(0) if self.planned else self._route(request, body or {})
        self.planned += self.planned_after.pop(request.url.path.rpartition("/")[2], [])
        response.headers["X-Request-Id"] = "req_of_the_header"
        return response

    def _route(self, request: Request, body: JSON) -> Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return problem(401, "unauthenticated")
        match request.method, request.url.path.strip("/").split("/"):
            case "POST", ["contexts"]:
                return self._create(request, body)
            case "GET", ["contexts"]:
                return self._list(request)
            case "DELETE", ["contexts", context_id]:
                self.contexts.pop(context_id, None)
                return Response(status_code=204)
            case method, ["contexts", context_id, *rest] if context_id in self.contexts:
                return self._one(method, context_id, rest, body)
            case _, ["contexts", *_]:
                return problem(404, "context_not_found")
            case _:
                return problem(404, "not_found")

    def _create(self, request: Request, body: JSON) -> Response:
        key = request.headers.get("Idempotency-Key")
        if key not in self.keys:
            if not body["document"].strip():
                return problem(422, "empty_document")
            context = context_object(len(self.contexts), body)
            self.contexts[context["id"]] = context
            self.documents[context["id"]] = body["document"]
            self.keys[str(key)] = context["id"]
        context = self.contexts[self.keys[str(key)]]
        return JSONResponse(context, 202, headers={"Retry-After": "2"})

    def _list(self, request: Request) -> Response:
        query = request.query_params
        found = sorted(self.contexts.values(), key=lambda context: context["id"])
        if query["order"] == "desc":
            found.reverse()
        if "status" in query:
            found = [context for context in found if context["status"] == query["status"]]
        for name, value in query.items():
            if name.startswith("metadata."):
                key = name.removeprefix("metadata.")
                found = [context for context in found if context["metadata"].get(key) == value]
        if "after" in query:
            ids = [context["id"] for context in found]
            found = found[ids.index(query["after"]) + 1 :]
        page = found[: int(query["limit"])]
        return JSONResponse(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(found) > len(page),
            }
        )

    def _one(self, method: str, context_id: str, rest: list[str], body: JSON) -> Response:
        context = self.contexts[context_id]
        match method, rest:
            case "GET", []:
                return JSONResponse(context)
            case "PATCH", []:
                changes = dict(body)
                expires_after = changes.pop("expires_after", None)
                context |= changes | {"expires_at": expires_after and "2027-01-01T00:00:00.000Z"}
                return JSONResponse(context)
            case "GET", ["document"]:
                text = self.documents[context_id]
                return JSONResponse({"object": "document", "document": text})
            case "GET", ["events"]:
                return StreamingResponse(self._build(context_id), media_type="text/event-stream")
            case "POST", ["rebuild"]:
                if context["status"] != "ready":
                    context |= {"status": "queued", "error": None}
                return JSONResponse(context, 202)
            case "POST", ["prefetch"]:
                return JSONResponse(context, 202)
            case "POST", ["query"]:
                return self._query(context, body)
            case _:
                return problem(404, "not_found")

    async def _build(self, context_id: str) -> AsyncIterator[bytes]:
        context = self.contexts[context_id]
        for stage, fraction in self.stages:
            context["status"] = "building"
            context["progress"] = {"stage": stage, "fraction": fraction}
            yield b": ping\n\n"
            yield sse("progress", context)
            await asyncio.sleep(0)
        self.is_building.set()
        while self.ends_as == "forever":
            yield b": ping\n\n"
            await asyncio.sleep(0.01)
        if self.ends_as == "building":
            raise ConnectionAbortedError("the stand-in breaks off as it was told to")
        self.finish(context_id, self.ends_as)
        yield sse("progress", context)

    def _query(self, context: JSON, body: JSON) -> Response:
        if context["status"] != "ready":
            headers = {"Retry-After": "2"}
            return problem(409, "context_not_ready", headers=headers, status_of_context="building")
        context["queries"] += 1
        if (session := body.get("session")) is not None and session not in self.kept:
            return problem(410, "session_gone", session=session, reason="expired")
        questions = body.get("questions", [None])
        answers = [self._new_answer(context, body) for _ in questions]
        if session is not None and not body["fork"]:
            self.kept.remove(session)
        if "questions" in body:
            return JSONResponse({"object": "list", "data": answers})
        (answer,) = answers
        if not body["stream"]:
            return JSONResponse(answer)
        return StreamingResponse(self._tokens(answer), media_type="text/event-stream")

    def _new_answer(self, context: JSON, body: JSON) -> JSON:
        answer = answer_object(context["id"], "".join(self.pieces), number=len(self.kept_ever) + 1)
        self.kept.add(answer["id"])
        self.kept_ever.append(answer["id"])
        if body.get("return_token_ids"):
            answer |= {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]}
        if body.get("logprobs"):
            answer["logprobs"] = logprobs_object()
        return answer

    async def _tokens(self, answer: JSON) -> AsyncIterator[bytes]:
        try:
            for index, text in enumerate(self.pieces):
                event = sse("token", {"text": text, "index": index})
                # Cut anywhere: a chunk may end inside a character.
                yield event[:23]
                yield event[23:]
            match self.stream_ends_with:
                case "done":
                    yield sse("done", answer)
                case "error":
                    yield sse("error", problem_body(503, "worker_unavailable"))
                case "break":
                    raise ConnectionAbortedError("the stand-in breaks off as it was told to")
                case "forever":
                    while True:
                        yield sse("token", {"text": "and ", "index": 0})
                        await asyncio.sleep(0.001)
        finally:
            self.hung_up.set()
