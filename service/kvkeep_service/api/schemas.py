"""What goes in over HTTP: every field of the contract; unknown ones are refused.

Fields and values of the contract that this version cannot serve are accepted at their default
and otherwise refused by name, never ignored. ``ratio`` is the fraction of KV pairs kept.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from kvkeep_service.api.compression_schemas import Compression
from kvkeep_service.api.query_schemas import Message
from kvkeep_service.api.strict import WAIT_SECONDS_MAX, Body, Strict, only
from kvkeep_service.bounds import Bounds
from kvkeep_service.errors import EmptyDocument, InvalidRequest
from kvkeep_service.ports import DocumentSpec, Span
from kvkeep_storage.records import Expiry

TEN_YEARS_SECONDS: Final = 10 * 365 * 86400

Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
_COMPRESSION: Final = "it belongs under compression"


class NamedText(Strict):
    """One of several documents that are read as one."""

    name: str = Field(min_length=1, max_length=256)
    """What this document is called, 1 to 256 characters; the model reads it above the text."""
    text: str
    """The text of this document."""


class ProtectedSpan(Strict):
    """Half-open range of characters (Unicode code points) of the document."""

    start: Annotated[int, Bounds(0)]
    """First character (Unicode code point), counted from 0."""
    end: Annotated[int, Bounds(1)]
    """One past the last character; above start, at most the document's length."""


class ExpiresAfter(Strict):
    """So many seconds after creation or after the last query."""

    anchor: Literal["created_at", "last_used_at"]
    """What the seconds count from: creation, or the last query."""
    seconds: Annotated[int, Bounds(1, TEN_YEARS_SECONDS)]
    """Seconds from the anchor until the context expires, 1 to 315360000 (ten years)."""


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

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(Compression.model_fields, _COMPRESSION)

    document: str | None = None
    """The text to read, not only white space. Send either this or documents."""
    documents: list[NamedText] | None = Field(None, min_length=1, max_length=1024)
    """1 to 1024 texts that are read as one, in this order. Send either this or document."""
    messages: Annotated[list[Message] | None, only(None), WithJsonSchema({"type": "null"})] = None
    """A conversation to read; not supported yet: only null is accepted."""
    name: str | None = Field(None, max_length=256)
    """A name for people, at most 256 characters. null: none."""
    metadata: Metadata = Field(default_factory=dict)
    """At most 16 pairs of strings: keys of 1 to 64 characters, values up to 512."""
    system: str | None = None
    """System text before the document; never evicted. null: none."""
    instructions: str | None = None
    """Text between system and document; never evicted. Small models obey less at low ratios."""
    protect: list[ProtectedSpan] = Field(default_factory=list, max_length=4096)
    """At most 4096 character ranges of the document that are never evicted."""
    model: str | None = None
    """Name of the model, which must be the one served here. null: that one."""
    compression: Compression = Compression()
    """How the KV cache is compressed; left out, by kvzip to a ratio of 0.3."""
    expires_after: ExpiresAfter | None = None
    """When the context expires. null: never; left out: the server's default."""
    wait: Annotated[float, Bounds(0, WAIT_SECONDS_MAX)] = 0
    """Most seconds to hold the request until the context is ready, 0 to 300; as `?wait=`."""

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
            raise EmptyDocument("document" if self.documents is None else "documents")
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
    """The new name, at most 256 characters. null: none; left out: as it was."""
    metadata: Metadata = Field(default_factory=dict)
    """Replaces all metadata: at most 16 pairs, keys of 1 to 64 characters, values up to 512."""
    expires_after: ExpiresAfter | None = None
    """When the context expires. null: never; left out: as it was."""


def expiry(after: ExpiresAfter | None) -> Expiry | None:
    """Hand an expiry on as plain data; None is never."""
    return None if after is None else Expiry(after.anchor, after.seconds)
