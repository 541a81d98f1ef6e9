"""Whatever policy chose the rows of a cache, it answers alike from memory and from the store."""

from typing import get_args

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.policies.head_scores import HeadScores
from kvkeep_service.ports import CompressionSpec, PolicyName
from kvkeep_service.stores import Stores

from .serving import serving
from .tiny import SHORT
from .workbench import TENANT

pytestmark = pytest.mark.anyio

SCORES = HeadScores(((0.5, 0.25), (0.125, 0.75)), "digest")


async def test_every_policy_answers_the_same_from_memory_and_from_the_store(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny, head_scores=SCORES) as service:
        for name in get_args(PolicyName):
            ratio = 1.0 if name == "none" else 0.3
            request = await service.ready(SHORT, CompressionSpec(name, ratio))
            warm = await service.answer(request)
            await service.worker.drop(TENANT, request.cache_id)
            cold = await service.answer(request)
            assert (warm.timings.source, cold.timings.source) == ("resident", "store")
            assert cold.token_ids == warm.token_ids, name


async def test_a_cache_whose_scores_are_elsewhere_answers_without_the_documents_ids(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny, head_scores=SCORES) as service:
        request = await service.ready(SHORT, CompressionSpec("kvzip_head", 0.6))
        known = await service.answer(request)
        assert known.prompt_token_ids is not None
    async with serving(stores, tiny) as service:
        answer = await service.answer(request)
        assert answer.token_ids == known.token_ids
        assert answer.prompt_token_ids is None
