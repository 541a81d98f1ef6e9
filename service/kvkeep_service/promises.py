"""Planning a claimed build again: what it would make must be the cache that was promised."""

import asyncio

import structlog

from kvkeep_service.errors import (
    BuildMismatch,
    ContextModelMismatch,
    HeadScoresMissing,
    ServiceError,
)
from kvkeep_service.heartbeat import ContextDeleted
from kvkeep_service.mismatch import mismatch
from kvkeep_service.plan import BuildPlan, Planner
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import DocumentBody, get_document, missing_document
from kvkeep_storage.errors import Corrupt, Incompatible, NotFound, Unavailable
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import ContextRecord

_log = structlog.get_logger(__name__)


class BuildFailed(Exception):
    """The context cannot be built, now or later: ``code`` and ``detail`` are for its record."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class Postponed(Exception):
    """The build cannot be tried now. That is nobody's fault, and no attempt."""


class DeletionBegun(Exception):
    """The document is deleted and the record is not: in a moment, or for ever after a crash."""


class Promises:
    """Plans registered documents again for one builder."""

    def __init__(self, stores: Stores, planner: Planner) -> None:
        """``planner`` is of the served model."""
        self._stores = stores
        self._planner = planner
        # Caches that come out as others here, and why: planned once.
        self._foreign: dict[tuple[str, str], BuildMismatch] = {}

    def check_model(self, record: ContextRecord) -> None:
        """Refuse the context of another model. Raises: ContextModelMismatch."""
        served = self._planner.identity.model
        if record.model != served:
            raise ContextModelMismatch(record.id, record.model, served)

    def check_known(self, record: ContextRecord) -> None:
        """Refuse what ``plan`` has refused before. Raises: BuildMismatch."""
        foreign = self._foreign.get((record.tenant, record.cache_id))
        if foreign is not None:
            raise foreign.with_traceback(None)

    async def plan(self, record: ContextRecord) -> BuildPlan:
        """Read the document again; its fingerprint must be the one that was promised.

        Raises: BuildMismatch, when it is another one here; BuildFailed; Postponed;
            ContextDeleted, DeletionBegun; StoreMismatch, MetadataUnavailable,
            ObjectsUnavailable.
        """
        body = await self._document(record)
        try:
            plan = await asyncio.to_thread(self._planner.plan_stored, record.tenant, body)
        except HeadScoresMissing as error:
            raise self._refused(record, await mismatch(self._stores, record, None)) from error
        except BuildMismatch as error:
            raise self._refused(record, error) from None
        except ServiceError as error:
            raise BuildFailed(error.code, error.detail) from error
        if plan.fingerprint.digest != record.cache_id:
            raise self._refused(record, await mismatch(self._stores, record, plan.fingerprint))
        return plan

    def _refused(self, record: ContextRecord, why: BuildMismatch) -> BuildMismatch:
        _log.warning("build_of_another_identity", context=record.id, why=why.detail)
        self._foreign[record.tenant, record.cache_id] = why
        return why

    async def _document(self, record: ContextRecord) -> DocumentBody:
        stores, key = self._stores, DocumentKey(record.tenant, record.id)
        try:
            return await get_document(stores.objects, key)
        except Unavailable as error:
            # Nothing was tried yet: an outage must not use up the attempts of all that wait.
            _log.warning("build_postponed", context=record.id, code=error.code)
            raise Postponed from error
        except NotFound as error:
            if await stores.metadata.context(record.tenant, record.id) is None:
                raise ContextDeleted from error
            missing = await missing_document(stores.objects, stores.metadata, key)
            if isinstance(missing, NotFound):
                raise DeletionBegun from error
            raise BuildFailed("document_corrupt", "the stored document is missing") from error
        except Corrupt as error:
            raise BuildFailed("document_corrupt", "the stored document is damaged") from error
        except Incompatible as error:
            raise self._refused(record, BuildMismatch(str(error))) from error
