"""A worker without a model: it implements the whole port, and does what tests script.

Builds are real as far as storage goes: jobs are claimed, leases held, tiny caches committed.
Questions that name a script ("never ends", "breaks") follow it; all others get a fixed answer.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import cast

import numpy as np

from kvkeep_service.build_counts import BuildCounter, BuildCounts
from kvkeep_service.engine_counts import EngineCounts
from kvkeep_service.errors import (
    ContextNotReady,
    DocumentTooLong,
    Overloaded,
    QuestionTooLong,
    ServiceError,
    SessionGone,
    TemplateChangesPrefix,
)
from kvkeep_service.ports import (
    AnswerEvent,
    CacheCounts,
    CompressionSpec,
    DocumentSpec,
    KernelsInfo,
    LoadCount,
    ModelInfo,
    PolicyName,
    Prepared,
    QueryRequest,
    QueryTimings,
    Scoring,
    TokenChance,
    TokenEvent,
    TokenLogprob,
    WorkerStats,
)
from kvkeep_service.stores import Stores
from kvkeep_storage.artifact import CacheRows, LayerRows
from kvkeep_storage.commit import commit
from kvkeep_storage.documents import get_document
from kvkeep_storage.errors import ObjectsUnavailable
from kvkeep_storage.fingerprint import Fingerprint, digest_token_ids
from kvkeep_storage.jobs import Job
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.manifest import ManifestFacts

MAX_DOCUMENT_TOKENS = 1000
SURROUNDING_TOKENS = 7
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3)
CONTINUED = "ans_01K9Z3V5J8Q6W2E4R7T1Y0N5PX"
"""The one answer that can be continued."""
PIECES = ("It ends ", "on 31 March", " 2029 — ", "🙂", ".")

MODEL = ModelInfo(
    name="scripted",
    architecture="llama",
    device="cpu",
    dtype="float32",
    num_layers=2,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=1256,
    max_document_tokens=MAX_DOCUMENT_TOKENS,
    weights_digest="00" * 32,
    kernels=KernelsInfo("torch", "a script needs none", is_healthy=True),
)


class ScriptedWorker:
    """One per server, in its event loop. ``may_build`` holds builds back while it is clear."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self.info = MODEL
        self.may_build = asyncio.Event()
        self.may_build.set()
        self.alive = True
        self.running = 0
        self.closed = 0
        self.last_requests: tuple[QueryRequest, ...] = ()
        self.dropped: list[tuple[str, str]] = []
        self.conversing: list[tuple[str, str]] = []
        self.forgotten: list[tuple[str, str]] = []
        self.held: list[tuple[str, str]] = []
        self.prefetched: list[tuple[str, str, float]] = []
        self.fail_next_build = False
        self.policy_version = 1
        self.planning_error: ServiceError | None = None
        self._fingerprints: dict[str, Fingerprint] = {}

    @property
    def model(self) -> ModelInfo:
        return self.info

    async def prepare(
        self, tenant: str, document: DocumentSpec, compression: CompressionSpec
    ) -> Prepared:
        await asyncio.sleep(0)
        words = document.text.split()
        if len(words) > MAX_DOCUMENT_TOKENS:
            raise DocumentTooLong(len(words), MAX_DOCUMENT_TOKENS)
        fingerprint = _fingerprint(tenant, document, compression)
        self._fingerprints[fingerprint.digest] = fingerprint
        evicts = len(words) >= 4 and compression.policy != "none"
        ratio = compression.ratio
        if compression.tokens is not None:
            ratio = min(1.0, compression.tokens / len(words))
        return Prepared(
            prefix_text=f"<s>{document.system or ''}{document.instructions or ''}",
            document_tokens=len(words),
            protected_tokens=SURROUNDING_TOKENS,
            total_tokens=len(words) + SURROUNDING_TOKENS,
            policy_applied=compression.policy if evicts else "none",
            ratio=ratio if evicts else 1.0,
            full_bytes=64 * (len(words) + SURROUNDING_TOKENS),
            fingerprint=fingerprint,
            remainder=evicts and compression.policy == "kvzip" and compression.remainder,
        )

    async def planned(self, tenant: str, context_id: str) -> Fingerprint:
        body = await get_document(self._stores.objects, DocumentKey(tenant, context_id))
        if self.planning_error is not None:
            raise self.planning_error
        document = DocumentSpec(body.text, body.system, body.instructions)
        compression = CompressionSpec(
            policy=cast("PolicyName", body.policy), scoring=cast("Scoring", body.scoring)
        )
        return replace(
            _fingerprint(tenant, document, compression), policy_version=self.policy_version
        )

    async def query(
        self, *requests: QueryRequest
    ) -> AsyncGenerator[TokenEvent | AnswerEvent, None]:
        self.last_requests = requests
        self.running += 1
        try:
            for request in requests:
                _refuse(request.question)
                if request.session is not None and request.session != CONTINUED:
                    raise SessionGone(request.session, "expired")
            for index, piece in enumerate(PIECES):
                # The last one is the first, so that order is somebody's work.
                for place in reversed(range(len(requests))):
                    yield TokenEvent(piece, index, place)
                    await _misbehave(requests[place].question, index)
            for place in reversed(range(len(requests))):
                yield _answer(requests[place], place)
        finally:
            self.running -= 1
            self.closed += 1

    async def prefetch(self, tenant: str, cache_id: str, ratio: float) -> None:
        if len(self.prefetched) == 2:
            raise Overloaded(2, what="caches are being prefetched")
        self.prefetched.append((tenant, cache_id, ratio))

    async def drop(self, tenant: str, cache_id: str) -> None:
        self.dropped.append((tenant, cache_id))

    async def forget(self, tenant: str, context_id: str) -> None:
        self.forgotten.append((tenant, context_id))

    def conversations(self) -> list[tuple[str, str]]:
        return [key for key in self.conversing if key not in self.forgotten]

    def resident(self) -> list[tuple[str, str]]:
        return [key for key in self.held if key not in self.dropped]

    def stats(self) -> WorkerStats:
        return WorkerStats(0, 0, 0, self.running, 0, 0, self.alive)

    def engine_counts(self) -> EngineCounts:
        return EngineCounts(answer_seconds=2.5, build_seconds=1.5, out_of_memory=1, shed=0)

    def build_counts(self) -> BuildCounts:
        counter = BuildCounter()
        for loss in (0.015, 0.1, 2.0, None):
            counter.committed({"prefill_s": 1.5}, loss)
        counter.failed("max_loss_unreachable")
        return counter.counts

    def cache_counts(self) -> CacheCounts:
        return CacheCounts(
            hits=3,
            misses={"absent": 2, "ratio": 1},
            evictions=1,
            loads={"store": LoadCount(2, 0.5, 4096)},
            failures={"storage_unavailable": 1},
        )

    async def run_builds(self) -> None:
        """Claim and build until cancelled."""
        while True:
            job = await self._stores.jobs.claim("scripted", 0.2)
            if job is not None:
                await self.may_build.wait()
                await self._build(job)

    async def _build(self, job: Job) -> None:
        metadata = self._stores.metadata
        record = await metadata.context(job.tenant, job.context_id)
        if record is not None and record.awaits_build:
            if record.status != "ready":
                await metadata.set_building(
                    job.tenant, job.context_id, rebuilding=record.status == "rebuilding"
                )
            await metadata.progress(job.tenant, job.context_id, "scoring", 0.5)
            if self.fail_next_build:
                self.fail_next_build = False
                await metadata.fail_context(
                    job.tenant, job.context_id, "document_corrupt", "the document is damaged"
                )
            else:
                await self._commit(job, record.tokens_total)
        await self._stores.jobs.ack(job)

    async def _commit(self, job: Job, tokens_total: int) -> None:
        stores = self._stores
        record = await stores.metadata.context(job.tenant, job.context_id)
        assert record is not None
        lease = await stores.leases.acquire_build(job.tenant, record.cache_id, "scripted")
        assert lease is not None
        fingerprint = self._fingerprints[record.cache_id]
        facts = ManifestFacts(
            fingerprint=fingerprint,
            tokens_total=tokens_total,
            tokens_protected=SURROUNDING_TOKENS,
            ratio=record.ratio,
            ratio_achieved=record.ratio,
            policy_applied=record.policy_applied,
            timings={"prefill_s": 0.25},
            versions={},
        )
        ratios = (*(ratio for ratio in RATIOS if ratio < record.ratio), record.ratio)
        rows = _rows(ratios)
        try:
            await commit(stores.objects, stores.metadata, stores.leases, lease, rows, facts)
        finally:
            # As builders do: who deletes this cache needs the lease.
            await asyncio.shield(stores.leases.release(lease))


def _fingerprint(tenant: str, document: DocumentSpec, compression: CompressionSpec) -> Fingerprint:
    return Fingerprint(
        model=MODEL.name,
        weights_digest=MODEL.weights_digest,
        tokenizer_digest="11" * 32,
        prefix_text=f"{document.system}|{document.instructions}",
        dtype=MODEL.dtype,
        rope="",
        num_layers=MODEL.num_layers,
        num_kv_heads=MODEL.num_kv_heads,
        head_dim=MODEL.head_dim,
        token_ids_digest=digest_token_ids([ord(letter) for letter in document.text]),
        protected=(),
        policy=compression.policy,
        policy_version=1,
        policy_parameters={"scoring": compression.scoring},
        quantization="none",
        adapter_digest="",
        tenant_salt=tenant,
    )


def _rows(ratios: tuple[float, ...]) -> CacheRows:
    """One row per head and band: enough to be a cache."""
    bands = len(ratios)
    row_bytes = MODEL.head_dim * 4
    layer = LayerRows(
        np.zeros((bands, row_bytes), np.uint8),
        np.zeros((bands, row_bytes), np.uint8),
        np.arange(bands, dtype=np.int32),
    )
    shape = (bands, MODEL.num_layers, MODEL.num_kv_heads)
    return CacheRows(
        dtype="float32",
        num_kv_heads=MODEL.num_kv_heads,
        head_dim=MODEL.head_dim,
        ratios=ratios,
        counts=np.ones(shape, np.int32),
        protected=np.zeros(shape[1:], np.int32),
        layers=(layer,) * MODEL.num_layers,
    )


_REFUSALS: dict[str, Callable[[], Exception]] = {
    "is too long": lambda: QuestionTooLong(2000, 900),
    "comes too often": lambda: Overloaded(64, retry_after_seconds=3),
    "changes the prefix": lambda: TemplateChangesPrefix("chat_template_kwargs"),
    "finds a damaged cache": lambda: ContextNotReady("ctx", "rebuilding"),
    "breaks at once": lambda: RuntimeError("a secret of the document"),
}


def _refuse(question: str) -> None:
    if question in _REFUSALS:
        raise _REFUSALS[question]()


async def _misbehave(question: str, index: int) -> None:
    if question == "never ends" and index == 1:
        await asyncio.Event().wait()
    if question == "breaks" and index == 1:
        raise RuntimeError("a secret of the document")
    if question == "is lost on the way" and index == 1:
        raise ObjectsUnavailable("read", "kv-00.safetensors: no answer")


def _answer(request: QueryRequest, place: int) -> AnswerEvent:
    ids = tuple(range(len(PIECES))) if request.return_token_ids else None
    top = request.top_logprobs
    chances = [TokenChance(number, piece, -0.5 - number) for number, piece in enumerate(PIECES)]
    tokens = tuple(TokenLogprob(chance, tuple(chances[:top])) for chance in chances)
    return AnswerEvent(
        text="".join(PIECES),
        finish_reason="stop",
        prompt_tokens=48,
        cached_tokens=40,
        completion_tokens=len(PIECES),
        ratio=request.ratio,
        timings=QueryTimings(1.0, 2.0, "resident", 3.0, 6.0, 70.0),
        prompt_token_ids=None if ids is None else tuple(range(48)),
        token_ids=ids,
        logprobs=None if top is None else tokens,
        question=place,
    )
