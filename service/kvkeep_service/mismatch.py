"""Why a registered document cannot be built by this server: what it would build differently."""

from collections.abc import Iterator
from dataclasses import fields

from kvkeep_service.errors import BuildMismatch
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import Corrupt, Incompatible, NotFound, ObjectsUnavailable
from kvkeep_storage.fingerprint import Fingerprint, Parameter
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.manifest import Manifest
from kvkeep_storage.records import ContextRecord

_ADVICE = "serve with what it was registered with, or register the document again"
# Said when nothing tells what the document was registered with.
_ANY = (
    "weights, tokenizer, chat template, dtype, rope scaling, policy version, policy parameters or"
    " head scores are others than this server has"
)
_WORDS = {
    "weights_digest": "weights",
    "tokenizer_digest": "tokenizer or chat template",
    "token_ids_digest": "token ids of the document",
    "policy_version": "policy version",
    "head_scores": "head scores",
}
_SHOWN_CHARS = 16


async def mismatch(
    stores: Stores, record: ContextRecord, planned: Fingerprint | None
) -> BuildMismatch:
    """What to say of a context whose cache would not be what was promised.

    ``planned`` is what a build here would make, None where head scores are missing for it. The
    committed cache, where there is one that can be read, tells what it was promised to be.
    Raises: MetadataUnavailable.
    """
    if planned is None:
        reason = "it was registered with head scores, and this server has none"
    else:
        promised = await _promised(stores, record)
        differing = [] if promised is None else list(_differing(promised, planned))
        reason = "; ".join(differing) or f"its {_ANY}"
    return BuildMismatch(f"this server cannot build the context: {reason}; {_ADVICE}")


async def _promised(stores: Stores, record: ContextRecord) -> Fingerprint | None:
    committed = await stores.metadata.cache(record.tenant, record.cache_id)
    if committed is None:
        return None
    key = GenerationKey(record.tenant, record.cache_id, committed.generation)
    try:
        return Manifest.decode(await stores.objects.get(key.manifest)).fingerprint
    except (NotFound, Corrupt, Incompatible, ObjectsUnavailable):
        # It is wanted for the words only.
        return None


def _differing(promised: Fingerprint, planned: Fingerprint) -> Iterator[str]:
    was, here = _values(promised), _values(planned)
    for name in sorted(was.keys() | here.keys()):
        if was.get(name) != here.get(name):
            word = _WORDS.get(name, name)
            yield f"{word}: {_shown(was.get(name))} then, {_shown(here.get(name))} here"


def _values(fingerprint: Fingerprint) -> dict[str, Parameter]:
    """Every part of it by name. The spans and texts of the document are not for messages."""
    hidden = {"prefix_text", "protected", "policy_parameters", "tenant_salt"}
    names = [item.name for item in fields(Fingerprint) if item.name not in hidden]
    own: dict[str, Parameter] = {name: getattr(fingerprint, name) for name in names}
    return own | dict(fingerprint.policy_parameters)


def _shown(value: Parameter | None) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
