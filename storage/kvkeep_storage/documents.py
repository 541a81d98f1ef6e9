"""What is kept of a registered document: the text itself, and a mirror of its record.

Both are JSON in a sealed envelope that names its owner and carries its own sha256, so damage
and a file in another's place are both seen. Documents are never swept as orphans: they go by
DELETE or by expiry only.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkeep_storage.binding import require_bound
from kvkeep_storage.errors import (
    Conflict,
    DocumentCorrupt,
    Incompatible,
    NotFound,
    RecordCorrupt,
)
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import ContextRecord

_ENVELOPE_VERSION = 1
# Each round loses against another writer of the same context; two are rare already.
_MIRROR_ROUNDS = 5

_Kind = Literal["document", "context"]
_Position = Annotated[int, Field(ge=0)]


class DocumentBody(BaseModel):
    """A document as registered, and how it was to be compressed: enough to build it again.

    ``protect`` holds half-open character spans of ``text``. ``ratio`` is the fraction kept.
    ``prefix_text`` is the rendered text in front of the document.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    text: str
    system: str | None
    instructions: str | None
    protect: tuple[tuple[_Position, _Position], ...]
    prefix_text: str
    policy: str
    ratio: Annotated[float, Field(gt=0, le=1)]
    scoring: str
    # Not written when they are as here: so are documents of versions that knew no other.
    quantization: str = "none"
    normalization: str = "none"
    neighbours: Annotated[int, Field(ge=0)] = 0
    # Whether something is to stand for the rows that are left out.
    remainder: bool = False
    # Where the ratio is to be found: by which loss, and from which ratio on.
    max_loss: Annotated[float | None, Field(ge=0)] = None
    ratio_from: Annotated[float | None, Field(gt=0, le=1)] = None


class _MirrorBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    record: dict[str, str]
    generation: str | None


@dataclass(frozen=True, slots=True)
class ContextMirror:
    """A context record as of some moment, and the generation that its cache had then."""

    record: ContextRecord
    generation: str | None


async def put_document(objects: Objects, key: DocumentKey, body: DocumentBody) -> None:
    """Store a document durably. May be retried. Raises: Full, ObjectsUnavailable."""
    await objects.put(key.body, _seal("document", key, body))


async def get_document(objects: Objects, key: DocumentKey) -> DocumentBody:
    """Read a document and verify it.

    Raises: NotFound; DocumentCorrupt; Incompatible for a newer envelope; ObjectsUnavailable.
    """
    return await _read("document", objects, key, key.body, DocumentBody)


async def delete_document(objects: Objects, key: DocumentKey) -> None:
    """Remove a document and its mirror; missing ones count as removed.

    Neither comes back through a reindex, which needs both. To be done before the record goes,
    so that a crash in between leaves a record that can be deleted again. The mirror goes first:
    ``missing_document`` tells by it what was deleted from what was lost.
    Raises: ObjectsUnavailable, and then it may be called again.
    """
    await objects.delete(key.mirror)
    await objects.delete(key.body)


async def missing_document(
    objects: Objects, metadata: Metadata, key: DocumentKey
) -> NotFound | DocumentCorrupt:
    """What it means that a registered document is not there.

    NotFound when its context is deleted or its deletion has begun; DocumentCorrupt when it was
    lost. Raises: StoreMismatch, because in a wrongly mounted directory every document is missing;
    MetadataUnavailable, ObjectsUnavailable.
    """
    await require_bound(objects, metadata)
    deleted = NotFound("context", key.context_id)
    try:
        await objects.size(key.mirror)
    except NotFound:
        return deleted
    if await metadata.context(key.tenant, key.context_id) is None:
        return deleted
    return DocumentCorrupt(key.body, "it is missing")


async def get_mirror(objects: Objects, key: DocumentKey) -> ContextMirror:
    """Read a context's mirrored facts and verify them.

    Raises: NotFound; DocumentCorrupt; Incompatible for a newer envelope; ObjectsUnavailable.
    """
    body = await _read("context", objects, key, key.mirror, _MirrorBody)
    try:
        record = ContextRecord.from_hash(body.record)
    except RecordCorrupt as error:
        raise DocumentCorrupt(key.mirror, error.reason) from error
    if (record.tenant, record.id) != (key.tenant, key.context_id):
        raise DocumentCorrupt(key.mirror, f"it mirrors context {record.id!r}")
    return ContextMirror(record, body.generation)


async def mirror_context(objects: Objects, metadata: Metadata, key: DocumentKey) -> None:
    """Write ``context.json`` from the record as it is now; remove it when there is no record.

    Others may change or delete the record meanwhile, so it is read again after the write, and
    the mirror follows it. How often a context was used does not count as a change.
    Raises: Conflict when it never settles; StoreMismatch, because a flushed Redis knows no record
    and deletes nothing; Full, ObjectsUnavailable, MetadataUnavailable. The record stays as it is.
    """
    mirror = await _current(metadata, key)
    for _ in range(_MIRROR_ROUNDS):
        if mirror is None:
            await require_bound(objects, metadata)
            await objects.delete(key.mirror)
        else:
            body = _MirrorBody(record=mirror.record.to_hash(), generation=mirror.generation)
            await objects.put(key.mirror, _seal("context", key, body))
        written, mirror = mirror, await _current(metadata, key)
        if _without_usage(written) == _without_usage(mirror):
            return
    raise Conflict("context", key.context_id, "it changes faster than it can be mirrored")


async def _current(metadata: Metadata, key: DocumentKey) -> ContextMirror | None:
    record = await metadata.context(key.tenant, key.context_id)
    if record is None:
        return None
    cache = await metadata.cache(key.tenant, record.cache_id)
    return ContextMirror(record, None if cache is None else cache.generation)


def _without_usage(mirror: ContextMirror | None) -> ContextMirror | None:
    if mirror is None:
        return None
    unused = replace(mirror.record, last_used_at=None, expires_at=None, queries=0)
    return replace(mirror, record=unused)


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_version: int
    kind: _Kind
    tenant: str
    context_id: str
    sha256: str
    body: dict[str, object]


_Body = TypeVar("_Body", bound=BaseModel)


def _seal(kind: _Kind, key: DocumentKey, body: BaseModel) -> bytes:
    envelope = _Envelope(
        schema_version=_ENVELOPE_VERSION,
        kind=kind,
        tenant=key.tenant,
        context_id=key.context_id,
        sha256="",
        body=body.model_dump(mode="json", exclude_defaults=True),
    )
    return envelope.model_copy(update={"sha256": _digest(envelope)}).model_dump_json().encode()


async def _read(
    kind: _Kind, objects: Objects, key: DocumentKey, name: str, model: type[_Body]
) -> _Body:
    """Read and verify; twice when it is wrong, since a context fails for good by a bad document."""
    try:
        return _unseal(kind, key, name, await objects.get(name), model)
    except DocumentCorrupt:
        return _unseal(kind, key, name, await objects.get(name), model)


def _unseal(kind: _Kind, key: DocumentKey, name: str, content: bytes, model: type[_Body]) -> _Body:
    try:
        envelope = _Envelope.model_validate_json(content)
    except ValidationError as error:
        raise DocumentCorrupt(name, "not a sealed envelope") from error
    if envelope.sha256 != _digest(envelope):
        raise DocumentCorrupt(name, "its sha256 differs")
    if (envelope.kind, envelope.tenant, envelope.context_id) != (
        kind,
        key.tenant,
        key.context_id,
    ):
        raise DocumentCorrupt(name, f"it is the {envelope.kind} of {envelope.context_id!r}")
    if envelope.schema_version > _ENVELOPE_VERSION:
        version = str(envelope.schema_version)
        raise Incompatible("document schema_version", version, f"{_ENVELOPE_VERSION} or older")
    try:
        return model.model_validate_json(json.dumps(envelope.body))
    except ValidationError as error:
        # Its message would repeat the document; the fields are enough.
        fields = sorted({str(item["loc"][0]) for item in error.errors(include_input=False)})
        raise DocumentCorrupt(name, f"bad fields: {', '.join(fields)}") from None


def _digest(envelope: _Envelope) -> str:
    """Digest everything but the digest, spelled in one way whatever the file looks like."""
    content = envelope.model_dump(exclude={"sha256"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
