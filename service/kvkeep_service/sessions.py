"""Answers that can be continued: each one's conversation and tail, in a budget, for a time.

A tail belongs to the rows it was computed over: one generation of one cache, at one ratio. Whoever
continues an answer works on a copy, so what is kept never changes, whatever becomes of that one.
Belongs to the event loop of one process; nothing is stored.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kvkeep_service.engine.cache import Tail
from kvkeep_service.errors import SessionGone
from kvkeep_service.ports import Turn

GoneReason = Literal["unknown", "continued", "expired", "evicted", "cache_replaced"]

# Names of answers that have gone, with the reason: enough to explain them, and no more.
_REMEMBERED_MAX: Final = 4096


class AnswerName(NamedTuple):
    """An answer about a context of a tenant."""

    tenant: str
    context_id: str
    answer_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """What continuing an answer needs.

    ``turns`` end with the answer. ``ids`` are the tokens after the document whose rows ``tail``
    holds, over the rows of ``generation`` at ``ratio``. ``replaces`` is the answer that it
    continues without a fork: that stays until this one is continued, as a reply may be lost.
    """

    cache_id: str
    generation: str | None
    ratio: float
    turns: tuple[Turn, ...]
    ids: tuple[int, ...]
    tail: Tail
    replaces: AnswerName | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its tail and its texts, about."""
        return self.tail.size_bytes + sum(4 * len(turn.text) for turn in self.turns)

    def shared(self, ids: list[int]) -> int:
        """How many of these tokens the tail can spare reading; the last one always is read."""
        most = min(len(self.ids), len(ids) - 1)
        return next((at for at in range(most) if self.ids[at] != ids[at]), most)


@dataclass(slots=True)
class _Kept:
    conversation: Conversation
    used_at: float


class Sessions:
    """Conversations by the name of their last answer.

    When the budget is full, the tenant that holds most gives up what it has not used for longest.
    """

    def __init__(
        self,
        budget_bytes: int,
        ttl_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ttl_seconds`` count from the answer, or from its last continuation that was a fork."""
        self._budget_bytes = budget_bytes
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        # The least recently used comes first.
        self._kept: OrderedDict[AnswerName, _Kept] = OrderedDict()
        self._bytes_by_tenant: Counter[str] = Counter()
        self._gone: OrderedDict[AnswerName, GoneReason] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of everything that is kept."""
        return self._bytes_by_tenant.total()

    def __len__(self) -> int:
        """How many answers can be continued."""
        return len(self._kept)

    @property
    def contexts(self) -> list[tuple[str, str]]:
        """Tenant and id of the contexts whose answers are kept."""
        return sorted({(name.tenant, name.context_id) for name in self._kept})

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._budget_bytes > 0

    def keep(self, name: AnswerName, conversation: Conversation) -> None:
        """Keep what continues an answer, until it is given up or ``ttl_seconds`` have passed."""
        if conversation.size_bytes > self._budget_bytes:
            self._explain(name, "evicted")
            return
        self._kept[name] = _Kept(conversation, self._clock())
        self._bytes_by_tenant[name.tenant] += conversation.size_bytes
        while self.size_bytes > self._budget_bytes:
            self.drop(self._victim(), "evicted")
        self._watch_the_clock()

    def find(self, name: AnswerName, cache_id: str) -> Conversation:
        """What continues an answer; it counts as a use.

        Raises: SessionGone.
        """
        self._expire()
        kept = self._kept.get(name)
        if kept is None:
            raise SessionGone(name.answer_id, self._gone.get(name, "unknown"))
        if kept.conversation.cache_id != cache_id:
            raise self.replaced(name)
        kept.used_at = self._clock()
        self._kept.move_to_end(name)
        return kept.conversation

    def replaced(self, name: AnswerName) -> SessionGone:
        """Give up an answer over rows that are there no more, and say so."""
        self.drop(name, "cache_replaced")
        return SessionGone(name.answer_id, "cache_replaced")

    def drop(self, name: AnswerName, reason: GoneReason) -> None:
        """Give up an answer; one that is not kept needs no giving up."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        self._explain(name, reason)
        self._bytes_by_tenant[name.tenant] -= kept.conversation.size_bytes
        if not self._bytes_by_tenant[name.tenant]:
            del self._bytes_by_tenant[name.tenant]

    def drop_context(self, tenant: str, context_id: str) -> None:
        """Give up all answers about a context."""
        self._drop_all(lambda name, _: (name.tenant, name.context_id) == (tenant, context_id))

    def drop_cache(self, tenant: str, cache_id: str) -> None:
        """Give up all answers from a cache."""
        self._drop_all(lambda name, kept: (name.tenant, kept.cache_id) == (tenant, cache_id))

    def close(self) -> None:
        """Give up everything."""
        self._drop_all(lambda *_: True)
        self._watch_the_clock()

    def _drop_all(self, chosen: Callable[[AnswerName, Conversation], bool]) -> None:
        for name in [name for name, kept in self._kept.items() if chosen(name, kept.conversation)]:
            self.drop(name, "cache_replaced")

    def _victim(self) -> AnswerName:
        (tenant, _), *_ = self._bytes_by_tenant.most_common(1)
        return next(name for name in self._kept if name.tenant == tenant)

    def _expire(self) -> None:
        too_old = self._clock() - self._ttl_seconds
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if kept.used_at > too_old:
                return
            self.drop(name, "expired")

    def _watch_the_clock(self) -> None:
        """Be called when the oldest is due; memory is given back whether or not anybody asks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._expire()
        if self._kept:
            oldest = next(iter(self._kept.values()))
            seconds = oldest.used_at + self._ttl_seconds - self._clock()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(seconds, 0.0), self._watch_the_clock)

    def _explain(self, name: AnswerName, reason: GoneReason) -> None:
        self._gone[name] = reason
        self._gone.move_to_end(name)
        if len(self._gone) > _REMEMBERED_MAX:
            self._gone.popitem(last=False)
