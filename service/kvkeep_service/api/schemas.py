"""What goes in over HTTP: every field of the contract; unknown ones are refused.

Fields and values of the contract that this version cannot serve are accepted at their default
and otherwise refused by name, never ignored. ``ratio`` is the fraction of KV pairs kept.
"""

from typing import Annotated, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvkeep_service.errors import EmptyDocument, InvalidEncoding, InvalidRequest
from kvkeep_service.ports import CompressionSpec, DocumentSpec, Span
from kvkeep_storage.records import Expiry

DEFAULT_RATIO: Final = 0.3
LOSSY_BELOW: Final = 0.15
RATIO_MIN: Final = 0.05
WAIT_SECONDS_MAX: Final = 300
TEN_YEARS_SECONDS: Final = 10 * 365 * 86400

T = TypeVar("T")


def _only(*supported: object) -> AfterValidator:
    def check(value: T) -> T:
        if value not in supported:
            # The value is not repeated: it may be a conversation.
            raise PydanticCustomError(
                "unsupported",
                "this is not supported by this version; leave it out or send {supported}",
                {"supported": " or ".join(repr(value) for value in supported)},
            )
        return value

    return AfterValidator(check)


def _no_auto(value: object) -> object:
    if value == "auto":
        raise PydanticCustomError(
            "unsupported", "'auto' is not supported by this version; send a number"
        )
    return value


class Strict(BaseModel):
    """Part of a request body: unknown fields and values of another JSON type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Body(Strict):
    """A whole request body. Raises: InvalidEncoding, for text that is not Unicode."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: object) -> object:
        refuse_surrogates(value)
        return value


class NamedText(Strict):
    """One of several documents that are read as one."""

    name: str = Field(min_length=1, max_length=256)
    text: str


class Message(Strict):
    """A turn of a conversation."""

    role: str
    content: str


class ProtectedSpan(Strict):
    """Half-open range of characters (Unicode code points) of the document."""

    start: int = Field(ge=0)
    end: int = Field(ge=1)


class ExpiresAfter(Strict):
    """So many seconds after creation or after the last query."""

    anchor: Literal["created_at", "last_used_at"]
    seconds: int = Field(ge=1, le=TEN_YEARS_SECONDS)


class Compression(Strict):
    """How the KV cache of the document is compressed."""

    policy: Annotated[
        Literal[
            "kvzip",
            "kvzip_head",
            "kvpop",
            "streaming",
            "snapkv",
            "expected_attention",
            "random",
            "none",
        ],
        _only("kvzip", "none"),
    ] = "kvzip"
    ratio: Annotated[
        float | None,
        BeforeValidator(_no_auto),
        Field(description="Fraction kept, 0.05 to 1; below 0.15 only with allow_lossy."),
    ] = None
    allow_lossy: bool = False
    tokens: Annotated[int | None, _only(None)] = None
    neighbours: Annotated[int, _only(0)] = 0
    max_loss: Annotated[float | None, _only(None)] = None
    scoring: Literal["auto", "exact", "local"] = "auto"
    normalization: Annotated[Literal["none", "kvzip_plus"], _only("none")] = "none"
    quantization: Annotated[Literal["none", "int8", "int4", "fp8"], _only("none")] = "none"

    def spec(self) -> CompressionSpec:
        """Resolve defaults. Raises: InvalidRequest, for values that do not go together."""
        if self.policy == "none":
            if self.ratio not in (None, 1.0):
                raise InvalidRequest("compression.ratio", "policy 'none' keeps everything: 1.0")
            if self.scoring != "auto":
                raise InvalidRequest("compression.scoring", "policy 'none' scores nothing")
            return CompressionSpec("none", 1.0, "local")
        ratio = DEFAULT_RATIO if self.ratio is None else self.ratio
        check_ratio("compression.ratio", ratio, allow_lossy=self.allow_lossy)
        return CompressionSpec("kvzip", ratio, "exact" if self.scoring == "exact" else "local")


class ContextCreate(Body):
    """Register a document."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "document": "This agreement begins on 1 April 2026 and ends on 31 March 2029.",
                    "name": "Master services agreement",
                    "metadata": {"matter": "2291"},
                    "system": "You answer from the contract only.",
                    "compression": {"policy": "kvzip", "ratio": 0.3},
                    "expires_after": {"anchor": "last_used_at", "seconds": 604800},
                }
            ]
        }
    )

    document: str | None = None
    documents: list[NamedText] | None = Field(None, min_length=1, max_length=1024)
    messages: Annotated[list[Message] | None, _only(None)] = None
    name: str | None = Field(None, max_length=256)
    metadata: "Metadata" = Field(default_factory=dict)
    system: str | None = None
    instructions: str | None = None
    protect: list[ProtectedSpan] = Field(default_factory=list, max_length=4096)
    model: str | None = None
    compression: Compression = Compression()
    expires_after: ExpiresAfter | None = Field(
        None, description="null: never; left out: the server's default."
    )
    wait: float = Field(0, ge=0, le=WAIT_SECONDS_MAX, description="Seconds, as `?wait=`.")

    def document_spec(self) -> DocumentSpec:
        """Join what was sent to one text.

        Raises: InvalidRequest (neither or both forms; a span outside the text), EmptyDocument.
        """
        if (self.document is None) == (self.documents is None):
            raise InvalidRequest("document", "send either document or documents")
        if self.documents is None:
            bodies = [self.document or ""]
            text = bodies[0]
        else:
            bodies = [part.text for part in self.documents]
            text = "\n\n".join(f"{part.name}\n\n{part.text}" for part in self.documents)
        if not any(body.strip() for body in bodies):
            raise EmptyDocument
        return DocumentSpec(text, self.system, self.instructions, self._spans(len(text)))

    def _spans(self, length: int) -> tuple[Span, ...]:
        for index, span in enumerate(self.protect):
            if span.end <= span.start:
                raise InvalidRequest(f"protect.{index}.end", f"must be above start, {span.start}")
            if span.end > length:
                raise InvalidRequest(
                    f"protect.{index}.end", f"{span.end} is past the document's {length} characters"
                )
        return tuple(Span(span.start, span.end) for span in self.protect)


class ContextPatch(Body):
    """Change what may change; fields left out stay. ``metadata`` is replaced as a whole."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "Agreement, signed", "expires_after": None}]}
    )

    name: str | None = Field(None, max_length=256)
    metadata: "Metadata" = Field(default_factory=dict)
    expires_after: ExpiresAfter | None = None


class Query(Body):
    """Ask one question."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"question": "When does the agreement end?", "max_tokens": 64}]
        }
    )

    question: str | None = None
    questions: Annotated[list[str] | None, _only(None)] = None
    messages: Annotated[list[Message] | None, _only(None)] = None
    system: str | None = None
    ratio: float | None = Field(None, description="One of the context's ratios_available.")
    min_ratio: Annotated[float | None, _only(None)] = None
    allow_lossy: bool = False
    max_tokens: int = Field(256, ge=1, le=1_000_000)
    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=1_000_000, description="0: all tokens.")
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list, max_length=8
    )
    logprobs: Annotated[bool, _only(False)] = False
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, max_length=16)
    stream: bool = False
    session: Annotated[str | None, _only(None)] = None
    fork: Annotated[bool, _only(False)] = False
    wait: float = Field(0, ge=0, le=WAIT_SECONDS_MAX, description="Seconds, as `?wait=`.")

    def asked(self) -> str:
        """Return the question. Raises: InvalidRequest, when there is none."""
        if self.question is None or not self.question.strip():
            raise InvalidRequest("question", "must not be empty or only white space")
        return self.question


def expiry(after: ExpiresAfter | None) -> Expiry | None:
    """Hand an expiry on as plain data; None is never."""
    return None if after is None else Expiry(after.anchor, after.seconds)


def check_ratio(field: str, ratio: float, *, allow_lossy: bool) -> None:
    """Refuse a ratio outside the contract. Raises: InvalidRequest, naming the limit."""
    if not RATIO_MIN <= ratio <= 1.0:
        raise InvalidRequest(field, f"{ratio} is outside {RATIO_MIN} to 1.0")
    if ratio < LOSSY_BELOW and not allow_lossy:
        raise InvalidRequest(field, f"{ratio} is below {LOSSY_BELOW}: send allow_lossy too")


def refuse_surrogates(body: object) -> None:
    r"""Refuse lone surrogates (``\ud800``) anywhere in parsed JSON, names of fields included.

    Python keeps them in a string, and UTF-8 cannot: they would break the first write.
    Raises: InvalidEncoding, naming the field.
    """
    waiting: list[tuple[str, object]] = [("", body)]
    while waiting:
        path, value = waiting.pop()
        match value:
            case str():
                if not _is_text(value):
                    raise InvalidEncoding(path or "body", "a lone surrogate is not text")
            case list():
                waiting += [(f"{path}.{index}", item) for index, item in enumerate(value)]
            case dict():
                for key, item in value.items():
                    if not _is_text(key):
                        raise InvalidEncoding(path or "body", "the name of a field is not text")
                    waiting.append((f"{path}.{key}".lstrip("."), item))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="At most 16 pairs of strings, 64 and 512 characters."),
]
ContextCreate.model_rebuild()
ContextPatch.model_rebuild()
