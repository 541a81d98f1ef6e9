"""The queue of builds: one Redis stream with one consumer group.

An entry stays in the stream until it is acknowledged, so a crash loses nothing. Who works on an
entry shows it by heartbeats; an entry without one for the length of a lease may be claimed by
anybody, and each claim counts as an attempt. A job is only a hint that a context waits for a
build: duplicates are harmless, because the commit of a build is fenced. The queue stands in a
slot of its own in a cluster, so it is written after the record, and ``reconcile`` mends the gap.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvkeep_storage import queue_scripts as scripts
from kvkeep_storage.errors import Invalid, LeaseLost, RecordCorrupt, StorageError
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_keys import BUILDS, refusals
from kvkeep_storage.redis_link import Word, texts

MAX_ATTEMPTS: Final = 3
LEASE_TTL_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 3600.0
"""How long a job waits, once no builder can do it, for one that can."""

_GROUP: Final = "builders"
# Owns entries that wait to be claimed again.
_NOBODY: Final = "~nobody"
_POLL_SECONDS: Final = 1.0
# A consumer without entries that was not heard of for this many lease times is forgotten.
_FORGET_CONSUMER_TTLS: Final = 60
_QUEUED_AT_ONCE: Final = 500
_KEEP_REFUSALS_SECONDS: Final = round(2 * REFUSED_SECONDS)


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed build. ``attempts`` counts the claims so far, this one included, from 1."""

    id: str
    tenant: str
    context_id: str
    attempts: int
    owner: str


class Jobs:
    """Enqueue, claim and settle builds. All methods raise MetadataUnavailable.

    The holder of a job calls ``heartbeat`` every ``heartbeat_seconds``; a job unheard of for
    ``ttl_seconds``, by the clock of the server, may be claimed by another. A job with more than
    MAX_ATTEMPTS attempts is still handed out, for the claimer to mark its context failed.
    """

    def __init__(
        self,
        metadata: Metadata,
        *,
        ttl_seconds: float = LEASE_TTL_SECONDS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        refused_seconds: float = REFUSED_SECONDS,
    ) -> None:
        """Every process on one queue must use the same ``ttl_seconds``."""
        if not 0 < heartbeat_seconds < ttl_seconds:
            raise Invalid("heartbeat_seconds", f"{heartbeat_seconds} must be below {ttl_seconds}")
        self.heartbeat_seconds = heartbeat_seconds
        self._link = metadata.link
        self._ttl_ms = round(ttl_seconds * 1000)
        self._retry_ms = round(retry_seconds * 1000)
        self._refused_seconds = refused_seconds
        self._poll_seconds = min(_POLL_SECONDS, ttl_seconds, self._link.timeout_seconds / 2)
        # Handed out here and not settled. Whatever else an owner has got lost on the way to it,
        # which can be told only while no other call of its own is under way.
        self._held: set[str] = set()
        self._taking = asyncio.Lock()

    async def enqueue(self, tenant: str, context_id: str) -> None:
        """Add a build of a context, whose record must have been written before."""
        await self._link.run(scripts.ENQUEUE, [BUILDS], [_GROUP, tenant, context_id])

    async def claim(self, owner: str, block_seconds: float) -> Job | None:
        """Take a job: one whose owner fell silent, else a new one, oldest first.

        Waits up to ``block_seconds`` for one to come; None when none did. A call that is
        cancelled gives back what it was about to return, and one whose reply is lost leaves it
        to the owner's next call; neither counts as an attempt.
        Raises: RecordCorrupt for an entry that is no job, which is removed.
        """
        if owner == _NOBODY:
            raise Invalid("owner", f"{owner!r} is reserved")
        clock = asyncio.get_running_loop().time
        deadline = clock() + block_seconds
        while True:
            taken = await self._take(owner)
            if isinstance(taken, Job):
                return taken
            remaining = deadline - clock()
            if remaining <= 0:
                return None
            # Not for ever: a job whose owner falls silent comes without a new entry.
            seconds = min(remaining, self._poll_seconds)
            await self._link.wait_for_entry(BUILDS, taken, seconds)

    async def others_wait(self, tenant: str) -> bool:
        """Whether a tenant but this one has a job among the oldest, claimed or not."""
        arguments: list[Word] = [_GROUP, "-", _QUEUED_AT_ONCE]
        _, *queued = texts(await self._link.run(scripts.QUEUED, [BUILDS], arguments))
        return any(owner != tenant for owner in queued[::2])

    async def heartbeat(self, job: Job, owner: str) -> None:
        """Keep a job for its full time from now.

        Raises: LeaseLost when it is acknowledged, released, or claimed by another; a late
        heartbeat never takes a job back.
        """
        if await self._link.run(scripts.HEARTBEAT, [BUILDS], [_GROUP, owner, job.id]) != 1:
            raise LeaseLost("job", job.id, owner)

    async def ack(self, job: Job) -> bool:
        """Remove a settled job. False, and nothing removed, when it is no longer this owner's."""
        self._held.discard(job.id)
        return await self._link.run(scripts.ACK, [BUILDS], [_GROUP, job.owner, job.id]) == 1

    async def retry_later(self, job: Job, *, counted: bool = True) -> bool:
        """Give a job back, to be claimed by anybody after ``retry_seconds``.

        ``counted=False`` takes this attempt off the count: for a job that could not be tried,
        because another process builds the same cache. False, and nothing changed, when the job
        is no longer this owner's.
        """
        attempts = job.attempts if counted else job.attempts - 1
        return await self._release(job, attempts, max(0, self._ttl_ms - self._retry_ms))

    async def refuse(self, job: Job) -> bool:
        """Say that its owner can never do this job; it stays the owner's, to be settled.

        True when nobody has been able to for ``refused_seconds``: every builder that was heard of
        within ``ttl_seconds``, this one included, has refused it, and no other came meanwhile.
        """
        words: list[Word] = [_GROUP, _NOBODY, self._ttl_ms, job.owner, _KEEP_REFUSALS_SECONDS]
        waited = await self._link.run(scripts.REFUSE, [BUILDS, refusals(job.id)], words)
        return isinstance(waited, int) and waited >= self._refused_seconds

    async def num_builders(self) -> int:
        """How many owners take jobs now: those heard of within ``ttl_seconds``."""
        found = await self._link.run(scripts.BUILDERS, [BUILDS], [_GROUP, _NOBODY, self._ttl_ms])
        return found if isinstance(found, int) else 0

    async def void_owners(self) -> int:
        """Let every claimed job be claimed at once, its attempts kept; how many there were.

        Only for a start that owns the whole data directory: no other process can be alive.
        """
        voided = await self._link.run(scripts.VOID, [BUILDS], [_GROUP, _NOBODY, self._ttl_ms])
        return voided if isinstance(voided, int) else 0

    async def reconcile(self, metadata: Metadata) -> int:
        """Enqueue every unfinished context that has no job; how many there were.

        A context registered at this moment may get a second job. Consumers of processes long
        gone are forgotten on the way.
        """
        # The records first: a build that ends in between leaves a needless job, not a gap.
        unfinished = await metadata.unfinished()
        forget_ms = self._ttl_ms * _FORGET_CONSUMER_TTLS
        await self._link.run(scripts.FORGET, [BUILDS], [_GROUP, forget_ms])
        jobs, start = set[tuple[str, str]](), "-"
        while start:
            arguments: list[Word] = [_GROUP, start, _QUEUED_AT_ONCE]
            start, *queued = texts(await self._link.run(scripts.QUEUED, [BUILDS], arguments))
            jobs.update(zip(queued[::2], queued[1::2], strict=True))
        missing = [context for context in unfinished if context not in jobs]
        for tenant, context_id in missing:
            await self.enqueue(tenant, context_id)
        return len(missing)

    async def _take(self, owner: str) -> Job | str:
        """Take a job that can be had now, or learn the id of the last entry there was."""
        async with self._taking:
            calling = asyncio.create_task(
                self._link.run(
                    scripts.CLAIM, [BUILDS], [_GROUP, owner, self._ttl_ms, *sorted(self._held)]
                )
            )
            try:
                return await self._taken(owner, texts(await asyncio.shield(calling)))
            except asyncio.CancelledError:
                await asyncio.wait([calling])
                with suppress(StorageError):
                    taken = await self._taken(owner, texts(calling.result()))
                    if isinstance(taken, Job):
                        await self._release(taken, taken.attempts - 1, self._ttl_ms)
                raise

    async def _taken(self, owner: str, reply: Sequence[str]) -> Job | str:
        if len(reply) == 1:
            return reply[0]
        entry_id, attempts, *words = reply
        fields = dict(zip(words[::2], words[1::2], strict=True))
        try:
            job = Job(entry_id, fields["tenant"], fields["context"], int(attempts), owner)
        except KeyError as error:
            await self._link.run(scripts.ACK, [BUILDS], [_GROUP, owner, entry_id])
            raise RecordCorrupt(f"job {entry_id}", f"it has no field {error}") from error
        self._held.add(job.id)
        return job

    async def _release(self, job: Job, attempts: int, idle_ms: int) -> bool:
        self._held.discard(job.id)
        released = await self._link.run(
            scripts.RELEASE, [BUILDS], [_GROUP, job.owner, job.id, _NOBODY, idle_ms, attempts]
        )
        return released == 1
