"""Asking the worker whole: several at once, by chance, with logprobs, and of what goes away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import (
    ContextExpired,
    InvalidRequest,
    Overloaded,
    QuestionTooLong,
)
from kvkeep_service.forgetting import forget_conversations
from kvkeep_service.ports import Turn
from kvkeep_service.stores import Stores
from kvkeep_storage.records import Expiry

from .engine.gated import PATIENCE_SECONDS
from .serving import IDLE, Service, named, serving, together
from .tiny import LONG, document_tokens, with_positions
from .workbench import TENANT

pytestmark = pytest.mark.anyio


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


async def test_a_question_on_what_expires_meanwhile_is_answered(service: Service) -> None:
    request = await service.ready()
    whole = await service.ids(replace(request, max_tokens=30))
    service.model.hold_after(5)
    running = asyncio.create_task(service.ids(named(request, 1, max_tokens=30)))
    await asyncio.to_thread(service.model.wait_until_held)
    expiry = Expiry("created_at", 1)
    while (await service.status(request)) != "expired":
        await service.stores.metadata.patch_context(
            TENANT, request.context_id, name=None, metadata={}, expires=expiry
        )
    service.model.release()
    assert await running == whole
    with pytest.raises(ContextExpired):
        await service.registry.open_query(TENANT, request.context_id, None)
    await forget_conversations(service.stores, service.worker)
    assert service.worker.stats().sessions == 0


async def test_questions_asked_together_share_a_step_and_are_answered_as_alone(
    service: Service,
) -> None:
    request = await service.ready(LONG)
    asked = [
        replace(request, question=f"{word} is {word}?", temperature=1.2, seed=number)
        for number, word in enumerate(("rent", "ship", "cargo", "law", "war", "port", "coal"))
    ]
    alone = [await service.ids(one) for one in asked]
    assert len(set(alone)) == len(asked)
    service.model.batches.clear()
    assert await together(service, asked) == alone
    assert max(service.model.batches) == len(asked)
    assert service.worker.stats().pinned_caches == 0


async def test_one_question_that_is_too_long_refuses_all_before_anything_runs(
    stores: Stores, tiny: LoadedModel
) -> None:
    total = document_tokens(tiny, LONG)
    async with serving(stores, with_positions(tiny, total + 256)) as service:
        request = await service.ready(LONG)
        service.model.batches.clear()
        too_long = replace(request, question=" pear" * 300)
        with pytest.raises(QuestionTooLong) as refused:
            await together(service, [request, too_long, request])
        assert refused.value.facts["question"] == 1
        assert service.model.batches == []
        long_talk = (Turn("user", " pear" * 150), Turn("assistant", " plum" * 150))
        with pytest.raises(QuestionTooLong):
            await service.answer(replace(request, history=long_talk))


async def test_more_questions_than_may_wait_are_refused_and_none_is_left_running(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny, max_queue=2) as service:
        request = await service.ready()
        service.model.hold_after(0)
        with pytest.raises(Overloaded):
            await together(service, [replace(request, max_tokens=500)] * 40)
        service.model.release()
        await service.ids(request)
        stats = service.worker.stats()
        assert (stats.running_queries, stats.waiting_queries, stats.pinned_caches) == (0, 0, 0)


async def test_closing_the_iterator_stops_all_questions(service: Service) -> None:
    request = await service.ready()
    asked = [named(request, number, max_tokens=1000) for number in range(6)]
    async with aclosing(service.worker.query(*asked)) as events:
        await anext(events)
    await service.ids(replace(request, max_tokens=3))
    stats = service.worker.stats()
    assert (stats.running_queries, stats.pinned_caches, stats.sessions) == (0, 0, 0)


async def test_a_question_on_what_is_deleted_meanwhile_is_answered_and_cannot_be_continued(
    service: Service,
) -> None:
    request = await service.ready()
    whole = await service.ids(replace(request, max_tokens=30))
    service.model.hold_after(5)
    running = asyncio.create_task(service.ids(named(request, 1, max_tokens=30)))
    await asyncio.to_thread(service.model.wait_until_held)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await service.registry.delete(TENANT, request.context_id)
    service.model.release()
    assert await running == whole
    await forget_conversations(service.stores, service.worker)
    assert service.worker.stats() == IDLE


async def test_turns_that_the_template_cannot_render_are_refused(service: Service) -> None:
    request = await service.ready()
    with pytest.raises(InvalidRequest, match=r"chat_template_kwargs\.tools"):
        await service.answer(replace(request, chat_template_kwargs={"tools": []}))


async def test_logprobs_name_every_token_and_its_text(service: Service) -> None:
    request = replace(await service.ready(), top_logprobs=3)
    answer = await service.answer(request)
    assert answer.logprobs is not None
    assert tuple(token.chosen.token_id for token in answer.logprobs) == answer.token_ids
    for token in answer.logprobs:
        # Greedy: what was taken is the likeliest.
        assert token.top[0] == token.chosen
        assert [chance.logprob for chance in token.top] == sorted(
            (chance.logprob for chance in token.top), reverse=True
        )
        assert token.chosen.text == service.loaded.tokenizer.decode([token.chosen.token_id])
    assert (await service.answer(replace(request, top_logprobs=None))).logprobs is None


async def test_a_seed_gives_the_same_alone_together_and_from_the_store(
    stores: Stores, tiny: LoadedModel
) -> None:
    sampled = {"temperature": 1.5, "top_p": 0.95, "seed": 11, "max_tokens": 24}
    async with serving(stores, tiny) as first:
        request = await first.ready()
        asked = replace(request, **sampled)  # type: ignore[arg-type]  # fields
        alone = await first.ids(asked)
        others = [replace(asked, question=f"Number {n}?", seed=n) for n in range(5)]
        assert (await together(first, [*others[:3], asked, *others[3:]]))[3] == alone
        assert await first.ids(replace(asked, seed=12)) != alone
    async with serving(stores, tiny) as fresh:
        assert await fresh.ids(asked) == alone
