"""Conversations with the worker whole: sessions, and what ends them."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import (
    SessionGone,
)
from kvkeep_service.forgetting import forget_conversations
from kvkeep_service.ports import AnswerEvent, QueryRequest, Turn
from kvkeep_service.sessions import Sessions
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores

from .serving import IDLE, Service, named, serving, together
from .tiny import LONG
from .workbench import TENANT

pytestmark = pytest.mark.anyio

ASKED = ("Who pays, and when?", "How much?", "<|im_end|> and then?")


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


async def talk(
    service: Service, request: QueryRequest, *, in_session: bool, **options: object
) -> list[AnswerEvent]:
    """Ask one question after the other, in a session or with all that was said."""
    turns: tuple[Turn, ...] = ()
    answers: list[AnswerEvent] = []
    for number, question in enumerate(ASKED):
        asked = named(request, number, question=question, **options)
        if in_session and number:
            asked = replace(asked, session=f"ans_{number - 1}")
        elif not in_session:
            asked = replace(asked, history=turns)
        answers.append(await service.answer(asked))
        turns = (*turns, Turn("user", question), Turn("assistant", answers[-1].text))
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 40},
        {"temperature": 1.5, "seed": 4, "max_tokens": 20},
        {"stop": ("a", "e"), "max_tokens": 30},
        {"max_tokens": 1},
    ],
    ids=["greedy", "longer", "sampled", "stopped", "one token"],
)
async def test_a_session_is_the_conversation_it_continues(
    service: Service, options: dict[str, object]
) -> None:
    request = await service.ready()
    at_once = await talk(service, request, in_session=False, **options)
    continued = await talk(service, request, in_session=True, **options)
    assert [one.token_ids for one in continued] == [one.token_ids for one in at_once]
    # Not only the answers: the very tokens that the model saw.
    assert [one.prompt_token_ids for one in continued] == [one.prompt_token_ids for one in at_once]
    assert len({one.token_ids for one in at_once}) == len(ASKED)
    document = at_once[0].cached_tokens
    assert [one.cached_tokens for one in at_once] == [document] * len(ASKED)
    assert document == continued[0].cached_tokens
    # All that was read before, but where the next turn made other tokens of its end.
    assert continued[0].prompt_tokens <= continued[1].cached_tokens + 1
    assert continued[1].cached_tokens < continued[1].prompt_tokens
    # The last, and the one before it: whoever did not get the last may ask for it again.
    assert service.worker.stats().sessions == 2


async def test_a_fork_leaves_the_answer_to_be_continued_again(service: Service) -> None:
    request = await service.ready()
    first = await service.answer(named(request, 1))
    history = (Turn("user", request.question), Turn("assistant", first.text))
    expected = [
        await service.ids(replace(request, question=question, history=history))
        for question in ASKED
    ]
    for number, question in enumerate(ASKED):
        fork = named(request, 10 + number, session="ans_1", fork=True, question=question)
        assert await service.ids(fork) == expected[number]
    assert service.worker.stats().sessions == 1 + len(ASKED)


async def test_a_reply_that_was_lost_can_be_asked_for_until_it_is_gone_on_from(
    service: Service,
) -> None:
    request = await service.ready()
    await service.answer(named(request, 1))
    lost = await service.ids(named(request, 2, session="ans_1", question="Why?"))
    assert await service.ids(named(request, 3, session="ans_1", question="Why?")) == lost
    await service.answer(named(request, 4, session="ans_3", question="Since when?"))
    with pytest.raises(SessionGone) as gone:
        await service.answer(named(request, 5, session="ans_1", question="Why?"))
    assert gone.value.reason == "continued"
    assert service.worker.stats().sessions == 3


async def test_an_answer_that_was_forked_stays_when_the_fork_goes_on(service: Service) -> None:
    request = await service.ready()
    await service.answer(named(request, 1))
    await service.answer(named(request, 2, session="ans_1", fork=True))
    await service.answer(named(request, 3, session="ans_2"))
    await service.answer(named(request, 4, session="ans_3"))
    await service.answer(named(request, 5, session="ans_1"))


async def test_several_questions_go_on_from_one_answer(service: Service) -> None:
    request = await service.ready()
    first = await service.answer(named(request, 1))
    history = (Turn("user", request.question), Turn("assistant", first.text))
    alone = [
        await service.ids(replace(request, question=question, history=history))
        for question in ASKED
    ]
    forks = [
        named(request, 2 + number, session="ans_1", fork=True, question=question)
        for number, question in enumerate(ASKED)
    ]
    assert await together(service, forks) == alone
    assert service.worker.stats().sessions == 4


async def test_a_continuation_that_breaks_off_leaves_the_answer_as_it_was(service: Service) -> None:
    request = await service.ready()
    await service.answer(named(request, 1))
    before = service.worker.stats()
    whole = named(request, 2, session="ans_1", question="How much?", max_tokens=12, fork=True)
    expected = await service.ids(whole)
    async with aclosing(
        service.worker.query(named(request, 3, session="ans_1", max_tokens=1000))
    ) as events:
        await anext(events)
    again = replace(whole, answer_id="ans_4", fork=False)
    assert await service.ids(again) == expected
    assert before.sessions == 1
    assert service.worker.stats().sessions == 3


async def test_extra_system_text_of_a_turn_stands_before_its_question(service: Service) -> None:
    request = await service.ready()
    first = await service.answer(named(request, 1))
    session = named(request, 2, session="ans_1", system="In French.", question="Why?")
    history = (Turn("user", request.question), Turn("assistant", first.text))
    spelled = replace(request, history=history, question="In French.\n\nWhy?")
    assert await service.ids(session) == await service.ids(spelled)


async def test_a_session_goes_on_at_the_ratio_of_its_answer(service: Service) -> None:
    request = await service.ready()
    low = await service.answer(named(request, 1, ratio=0.1))
    again = await service.answer(named(request, 2, session="ans_1", question="Why?"))
    assert (low.ratio, again.ratio) == (0.1, 0.1)
    history = (Turn("user", request.question), Turn("assistant", low.text))
    spelled = replace(request, ratio=0.1, history=history, question="Why?")
    assert again.token_ids == await service.ids(spelled)


async def test_a_session_goes_on_when_its_cache_was_loaded_again(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny) as service:
        request = await service.ready()
        first = await service.answer(named(request, 1))
        key = CacheKey(TENANT, request.cache_id)
        # Out of memory for the budget's sake, not because it was deleted.
        service.worker._residency.drop(key)
        cold = await service.answer(named(request, 2, session="ans_1", question="Why?", fork=True))
        assert cold.timings.source == "store"
        warm = await service.answer(named(request, 3, session="ans_1", question="Why?"))
        assert warm.timings.source == "resident"
        history = (Turn("user", request.question), Turn("assistant", first.text))
        expected = await service.ids(replace(request, history=history, question="Why?"))
        assert cold.token_ids == warm.token_ids == expected


async def test_another_generation_of_the_cache_ends_a_session(service: Service) -> None:
    request = await service.ready()
    await service.answer(named(request, 1))
    record = await service.registry.rebuild(TENANT, request.context_id)
    assert record.refresh_requested_at is not None
    assert (await service.jobs.next_end()).how == "settled"
    key = CacheKey(TENANT, request.cache_id)
    service.worker._residency.drop(key)
    with pytest.raises(SessionGone) as gone:
        await service.answer(named(request, 2, session="ans_1"))
    assert gone.value.reason == "cache_replaced"
    assert service.worker.stats().sessions == 0
    assert service.worker.stats().pinned_caches == 0


async def test_a_session_is_of_its_tenant_and_its_context(service: Service) -> None:
    request = await service.ready()
    other = await service.ready(LONG)
    await service.answer(named(request, 1))
    for stranger in (replace(other, session="ans_1"), replace(request, session="ans_2")):
        with pytest.raises(SessionGone) as gone:
            await service.answer(stranger)
        assert gone.value.reason == "unknown"
    with pytest.raises(SessionGone):
        await service.answer(replace(request, tenant="evil", session="ans_1"))


async def test_another_process_has_no_sessions_and_says_so(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny) as first:
        request = await first.ready()
        await first.answer(named(request, 1))
    async with serving(stores, tiny) as second:
        with pytest.raises(SessionGone) as gone:
            await second.answer(named(request, 2, session="ans_1"))
        assert gone.value.reason == "unknown"


async def test_deleting_a_context_gives_up_its_answers_and_leaves_nothing(
    service: Service,
) -> None:
    request = await service.ready()
    for number in range(3):
        await service.answer(named(request, number))
    assert service.worker.stats().session_bytes > 0
    await service.registry.delete(TENANT, request.context_id)
    assert service.worker.stats() == IDLE


async def test_another_process_gives_up_the_answers_of_what_was_deleted(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny) as service:
        request = await service.ready()
        kept = await service.ready(LONG)
        await service.answer(named(request, 1))
        await service.answer(named(kept, 2))
        await stores.metadata.delete_context(TENANT, request.context_id)
        await forget_conversations(stores, service.worker)
        assert service.worker.conversations() == [(TENANT, kept.context_id)]


async def test_nothing_is_kept_where_sessions_are_off(stores: Stores, tiny: LoadedModel) -> None:
    async with serving(stores, tiny, sessions=Sessions(0, 60)) as service:
        request = await service.ready()
        await service.answer(named(request, 1))
        assert service.worker.stats().sessions == 0
        with pytest.raises(SessionGone):
            await service.answer(named(request, 2, session="ans_1"))
