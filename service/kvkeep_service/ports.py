"""The boundary between the HTTP side and the engine side: one protocol and its plain data.

Both sides import this module, so nothing here may reach torch, transformers or FastAPI.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvkeep_service.build_counts import BuildCounts
from kvkeep_service.engine_counts import EngineCounts
from kvkeep_storage.fidelity import Fidelity as Fidelity
from kvkeep_storage.fidelity import RatioFidelity as RatioFidelity
from kvkeep_storage.fingerprint import Fingerprint

PolicyName = Literal[
    "kvzip", "kvzip_head", "snapkv", "expected_attention", "streaming", "random", "none"
]
Normalization = Literal["none", "kvzip_plus"]
Quantization = Literal["none", "int8", "int4", "fp8"]
Scoring = Literal["exact", "local"]
NEIGHBOURS_MAX = 4
"""Chunks on each side that local scoring may be asked to see: more would cost as exact does."""
FinishReason = Literal["stop", "length"]
CacheSource = Literal["resident", "host", "disk", "store"]
MissReason = Literal["absent", "ratio", "evicted", "dropped", "corrupt"]


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open character range of the document, ``0 <= start < end``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DocumentSpec:
    """What the user registered, already one text, and what surrounds it in the prompt."""

    text: str
    system: str | None = None
    instructions: str | None = None
    protect: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class CompressionSpec:
    """How the KV cache is to be compressed. ``ratio`` is the fraction kept, in (0, 1].

    ``tokens``, where given, is kept rows per head on average instead, and ``ratio`` means nothing;
    ``max_loss``, in nats per token, has the ratio found, and ``ratio`` means nothing then either.
    ``allow_lossy`` says whether either may come to a ratio at which answers suffer.
    ``normalization``: what scores are multiplied by; it and ``scoring`` are KVzip's alone.
    ``neighbours``: chunks on each side of its own that local scoring sees.
    ``remainder``: whether a few rows per head stand for those that KVzip evicts.
    ``quantization``: what the numbers of what is kept become; "none" leaves them as they are.
    """

    policy: PolicyName = "kvzip"
    ratio: float = 0.3
    scoring: Scoring = "local"
    quantization: Quantization = "none"
    normalization: Normalization = "none"
    neighbours: int = 0
    remainder: bool = True
    tokens: int | None = None
    allow_lossy: bool = False
    max_loss: float | None = None


@dataclass(frozen=True, slots=True)
class KernelsInfo:
    """Which kernels serve, and why; not healthy when those that should serve failed a test."""

    backend: Literal["torch", "triton"]
    reason: str
    is_healthy: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model, as every response and the version page report it."""

    name: str
    architecture: str
    device: str
    dtype: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    max_document_tokens: int
    weights_digest: str
    kernels: KernelsInfo


@dataclass(frozen=True, slots=True)
class Prepared:
    """What registering needs to know before it answers: lengths, identity, and what is kept.

    ``ratio`` is the fraction that the build is to keep: 1.0 where nothing may be evicted.
    ``remainder``: whether what is evicted leaves a few rows.
    """

    prefix_text: str
    document_tokens: int
    protected_tokens: int
    total_tokens: int
    policy_applied: str
    ratio: float
    full_bytes: int
    fingerprint: Fingerprint
    candidates: tuple[float, ...] = ()
    remainder: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side has said in a conversation."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """One question on one ready context. ``ratio`` is a stored ratio.

    With ``min_ratio``, another stored one, any stored ratio in between will do; which one it is
    is fixed when the question is read, and said with the answer.

    ``history``: turns before the question, the user's first. ``session``: the id of an answer
    whose conversation this one continues, at the ratio of that one and whatever ``ratio`` says;
    with ``fork`` that answer can be continued once more. ``system`` stands before the first turn
    that is new. ``answer_id`` is what the answer will be called; without, none continues it.
    ``top_logprobs``: how many of the likeliest tokens to tell beside each one; None tells none.
    """

    tenant: str
    context_id: str
    cache_id: str
    ratio: float
    question: str
    min_ratio: float | None = None
    system: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    return_token_ids: bool = False
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    history: tuple[Turn, ...] = ()
    answer_id: str | None = None
    session: str | None = None
    fork: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token and the natural logarithm of its probability, before any sampling option."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token, and the likeliest ones that could have stood in its place."""

    chosen: TokenChance
    top: tuple[TokenChance, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryTimings:
    """Where the time of a query went; milliseconds, and decode tokens per second."""

    queue_ms: float
    load_ms: float
    source: CacheSource
    prefill_ms: float
    ttft_ms: float
    decode_tps: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A piece of an answer, cut at a UTF-8 boundary. ``index`` counts its pieces from 0.

    ``question``: the place of the request among those that are answered together.
    """

    text: str
    index: int
    question: int = 0


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """The end of an answer: the whole text, which equals the joined pieces.

    ``cached_tokens`` of the prompt were not read again. ``question`` as in a token event.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ratio: float
    timings: QueryTimings
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    question: int = 0


@dataclass(frozen=True, slots=True)
class LoadCount:
    """Loads of caches that have ended well since the start, from one source."""

    loads: int
    seconds: float
    read_bytes: int


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """How often caches were in memory, why not, and what bringing them took, since the start.

    ``failures`` are loads that failed, by the code of the error.
    """

    hits: int
    misses: Mapping[MissReason, int]
    evictions: int
    loads: Mapping[CacheSource, LoadCount]
    failures: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A snapshot for health and tests; every count returns to its idle value."""

    resident_caches: int
    resident_bytes: int
    pinned_caches: int
    running_queries: int
    waiting_queries: int
    running_builds: int
    alive: bool
    running_loads: int = 0
    host_caches: int = 0
    host_bytes: int = 0
    is_store_full: bool = False
    reserved_bytes: int = 0
    sessions: int = 0
    session_bytes: int = 0


class Worker(Protocol):
    """Runs one model. Claims builds from the durable queue by itself once started."""

    @property
    def model(self) -> ModelInfo:
        """The one model that this worker serves."""
        ...

    async def prepare(
        self, tenant: str, document: DocumentSpec, compression: CompressionSpec
    ) -> Prepared:
        """Tokenise and identify a document, off the event loop; changes nothing.

        Raises: DocumentTooLong, InvalidRequest (a span outside the document).
        """
        ...

    async def planned(self, tenant: str, context_id: str) -> Fingerprint:
        """What building a registered document here would make, off the event loop.

        Raises: as ``prepare``; HeadScoresMissing; BuildMismatch, for what this version lacks; and
        storage errors when the document cannot be read.
        """
        ...

    def query(self, *requests: QueryRequest) -> AsyncGenerator[TokenEvent | AnswerEvent]:
        """Answer questions: of each one token events, then exactly one answer event.

        Several are answered together, and must agree in context, cache, ratios and session.
        What is wrong with one of them refuses all before any is read; what fails later ends
        all. Closing the iterator (``aclose``) stops the generation within one token.
        Raises: QuestionTooLong, Overloaded, TemplateChangesPrefix, SessionGone, InvalidRequest
        (turns that cannot be rendered after a document), LogitsNotFinite, AnswerFailed (whatever
        else computing it ended with), and storage errors when the cache cannot be loaded. After a
        corrupt load the context has already been set to ``rebuilding``, and ContextNotReady is
        raised; or, where corrupt caches are not rebuilt, to ``failed``, and ContextFailed is.
        """
        ...

    async def prefetch(self, tenant: str, cache_id: str, ratio: float) -> None:
        """Begin to load a cache, which nobody waits for; what becomes of it is told to nobody.

        Raises: Overloaded, when as many are being loaded so as may be.
        """
        ...

    async def drop(self, tenant: str, cache_id: str) -> None:
        """Forget a cache once its running queries end, here and in host memory."""
        ...

    async def forget(self, tenant: str, context_id: str) -> None:
        """Give up what is kept to continue the answers of a context."""
        ...

    def conversations(self) -> list[tuple[str, str]]:
        """Tenant and id of every context with an answer that can be continued here."""
        ...

    def resident(self) -> list[tuple[str, str]]:
        """Tenant and id of every cache that a query would find here or in host memory."""
        ...

    def stats(self) -> WorkerStats:
        """Counts as of now."""
        ...

    def engine_counts(self) -> EngineCounts:
        """What the engine has done since the start."""
        ...

    def build_counts(self) -> BuildCounts:
        """What became of builds, since the start."""
        ...

    def cache_counts(self) -> CacheCounts:
        """What became of looking for caches in memory, since the start."""
        ...
