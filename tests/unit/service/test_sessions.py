"""What is kept to continue answers: in a budget, for a time, for its tenant, and explained."""

import asyncio

import pytest
import torch

from kvkeep_service.engine.cache import Tail
from kvkeep_service.engine.model import ModelShape
from kvkeep_service.errors import SessionGone
from kvkeep_service.ports import Turn
from kvkeep_service.sessions import AnswerName, Conversation, Sessions

from .engine.models import engine_model, stock_model

pytestmark = pytest.mark.anyio

TTL_SECONDS = 100.0
CACHE = "cache"


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return engine_model(stock_model("llama")).shape


@pytest.fixture
def clock() -> Clock:
    return Clock()


def conversation(shape: ModelShape, tokens: int = 10, cache_id: str = CACHE) -> Conversation:
    tail = Tail(shape, dtype=torch.float32, device=torch.device("cpu"))
    ids = tuple(range(tokens))
    return Conversation(cache_id, "one", 0.3, (Turn("user", ""),), ids, tail.copied(tokens))


def name(number: int, tenant: str = "acme", context: str = "ctx") -> AnswerName:
    return AnswerName(tenant, context, f"ans_{number}")


def reason(sessions: Sessions, answer: AnswerName, cache_id: str = CACHE) -> str:
    with pytest.raises(SessionGone) as gone:
        sessions.find(answer, cache_id)
    return gone.value.reason


async def test_what_was_kept_is_found_and_counted(shape: ModelShape, clock: Clock) -> None:
    sessions = Sessions(2**30, TTL_SECONDS, clock)
    kept = conversation(shape)
    sessions.keep(name(1), kept)
    assert sessions.find(name(1), CACHE) is kept
    assert (len(sessions), sessions.size_bytes) == (1, kept.tail.size_bytes)
    assert sessions.contexts == [("acme", "ctx")]
    sessions.close()
    assert (len(sessions), sessions.size_bytes, sessions.contexts) == (0, 0, [])


async def test_no_other_name_finds_it(shape: ModelShape, clock: Clock) -> None:
    sessions = Sessions(2**30, TTL_SECONDS, clock)
    sessions.keep(name(1), conversation(shape))
    for other in (name(2), name(1, tenant="evil"), name(1, context="other")):
        assert reason(sessions, other) == "unknown"
    assert len(sessions) == 1
    sessions.close()


async def test_a_full_budget_gives_up_the_least_recently_used(
    shape: ModelShape, clock: Clock
) -> None:
    size = conversation(shape).size_bytes
    sessions = Sessions(3 * size, TTL_SECONDS, clock)
    for number in range(3):
        sessions.keep(name(number), conversation(shape))
    sessions.find(name(0), CACHE)
    sessions.keep(name(3), conversation(shape))
    assert reason(sessions, name(1)) == "evicted"
    assert sessions.size_bytes == 3 * size
    for number in (0, 2, 3):
        sessions.find(name(number), CACHE)
    sessions.close()


async def test_who_holds_most_gives_up_first(shape: ModelShape, clock: Clock) -> None:
    size = conversation(shape).size_bytes
    sessions = Sessions(4 * size, TTL_SECONDS, clock)
    sessions.keep(name(0, "quiet"), conversation(shape))
    for number in range(20):
        sessions.keep(name(number, "busy"), conversation(shape))
    sessions.find(name(0, "quiet"), CACHE)
    for number in (17, 18, 19):
        sessions.find(name(number, "busy"), CACHE)
    assert len(sessions) == 4
    sessions.close()


async def test_what_the_budget_has_no_room_for_is_not_kept(shape: ModelShape, clock: Clock) -> None:
    size = conversation(shape).size_bytes
    sessions = Sessions(size, TTL_SECONDS, clock)
    sessions.keep(name(1), conversation(shape))
    sessions.keep(name(2), conversation(shape, tokens=30))
    sessions.find(name(1), CACHE)
    assert reason(sessions, name(2)) == "evicted"
    sessions.close()
    assert not Sessions(0, TTL_SECONDS).is_on


async def test_it_expires_after_its_last_use(shape: ModelShape, clock: Clock) -> None:
    sessions = Sessions(2**30, TTL_SECONDS, clock)
    sessions.keep(name(1), conversation(shape))
    sessions.keep(name(2), conversation(shape))
    clock.now += TTL_SECONDS - 1
    sessions.find(name(1), CACHE)
    clock.now += 1
    assert reason(sessions, name(2)) == "expired"
    sessions.find(name(1), CACHE)
    clock.now += TTL_SECONDS
    assert reason(sessions, name(1)) == "expired"
    assert sessions.size_bytes == 0
    sessions.close()


async def test_memory_is_given_back_when_nobody_asks_again(shape: ModelShape) -> None:
    sessions = Sessions(2**30, 0.001)
    for number in range(3):
        sessions.keep(name(number), conversation(shape))
    # A later call of the same loop: a timer that was set before is due before.
    due = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.1, due.set_result, None)
    await due
    assert (len(sessions), sessions.size_bytes) == (0, 0)
    sessions.close()


async def test_another_cache_of_the_context_ends_it(shape: ModelShape, clock: Clock) -> None:
    sessions = Sessions(2**30, TTL_SECONDS, clock)
    sessions.keep(name(1), conversation(shape))
    assert reason(sessions, name(1), "another") == "cache_replaced"
    assert sessions.size_bytes == 0
    sessions.close()


async def test_what_is_deleted_takes_its_answers_along(shape: ModelShape, clock: Clock) -> None:
    sessions = Sessions(2**30, TTL_SECONDS, clock)
    sessions.keep(name(1), conversation(shape))
    sessions.keep(name(2, context="other"), conversation(shape, cache_id="shared"))
    sessions.keep(name(3, context="third"), conversation(shape, cache_id="shared"))
    sessions.keep(name(4, "evil", "other"), conversation(shape, cache_id="shared"))
    sessions.drop_context("acme", "ctx")
    assert sessions.contexts == [("acme", "other"), ("acme", "third"), ("evil", "other")]
    sessions.drop_cache("acme", "shared")
    assert sessions.contexts == [("evil", "other")]
    sessions.drop_context("evil", "other")
    assert sessions.size_bytes == 0
    sessions.close()


@pytest.mark.parametrize(
    ("ids", "shared"),
    [
        ([0, 1, 2, 3, 4, 5, 6], 5),
        ([0, 1, 2, 3, 4], 4),
        ([0, 1, 9, 3, 4, 5], 2),
        ([9, 1, 2], 0),
        ([0], 0),
    ],
    ids=["longer", "equal", "differs", "from the first", "one"],
)
def test_what_a_tail_spares_is_the_common_beginning_but_the_last(
    shape: ModelShape, ids: list[int], shared: int
) -> None:
    assert conversation(shape, tokens=5).shared(ids) == shared
