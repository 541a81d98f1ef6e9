"""Whatever ends an answer in the engine has a code of the contract, and the engine goes on."""

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

import kvkeep_kernels
from kvkeep_service import engine, policies
from kvkeep_service.api.errors import CATALOGUE, failure_of
from kvkeep_service.engine.arrival import NotYet
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import ServiceError
from kvkeep_service.stores import Stores

from .serving import Service, serving

pytestmark = pytest.mark.anyio

SECRET = "a secret of the document"
# What it means that a question waits for its context; it never ends one.
_NO_END = {NotYet}
_FROM_OUTSIDE = {
    FloatingPointError: "logits_not_finite",
    MemoryError: "overloaded",
    torch.OutOfMemoryError: "overloaded",
    RuntimeError: "answer_failed",
    IndexError: "answer_failed",
    AssertionError: "answer_failed",
}


def own_errors() -> Iterator[type[Exception]]:
    """Every exception that the engine, its policies and the kernels define."""
    for package in (engine, policies, kvkeep_kernels):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.ispkg:
                continue  # Triton's own half: it defines none, and may not be importable here.
            for value in vars(importlib.import_module(module.name)).values():
                if (
                    isinstance(value, type)
                    and issubclass(value, Exception)
                    and value.__module__ == module.name
                ):
                    yield value


OWN = sorted(set(own_errors()) - _NO_END, key=lambda kind: kind.__name__)


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


async def test_every_error_of_the_engine_is_one_of_the_contract(service: Service) -> None:
    request = await service.ready()
    assert {"ShapeError", "RatioMissed"} <= {kind.__name__ for kind in OWN}
    expected = dict.fromkeys(OWN, "answer_failed") | _FROM_OUTSIDE
    for kind, code in expected.items():
        error = kind.__new__(kind)
        Exception.__init__(error, SECRET)
        service.model.error = error
        with pytest.raises(ServiceError) as caught:
            await service.answer(request)
        service.model.error = None
        failure = failure_of(caught.value)
        assert failure.code == code, kind
        assert code in CATALOGUE
        assert SECRET not in failure.detail
    assert (await service.answer(request)).text


async def test_logits_that_are_not_finite_are_told_with_the_dtype_and_spare_the_next(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await service.ready()
    before = await service.ids(request)
    logits = service.model.logits
    with monkeypatch.context() as patch:
        patch.setattr(service.model, "logits", lambda hidden: logits(hidden) * torch.nan)
        with pytest.raises(Exception, match="not finite, in float32") as caught:
            await service.answer(request)
    failure = failure_of(caught.value)
    assert (failure.code, dict(failure.facts)) == ("logits_not_finite", {"dtype": "float32"})
    assert CATALOGUE[failure.code].status == 500
    assert await service.ids(request) == before


async def test_a_load_without_memory_says_that_it_may_pass(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await service.ready()
    await service.worker.drop(request.tenant, request.cache_id)

    async def short(*_: object) -> None:
        raise torch.OutOfMemoryError(SECRET)

    monkeypatch.setattr("kvkeep_service.worker.bring", short)
    with pytest.raises(Exception, match="no memory") as caught:
        await service.answer(request)
    failure = failure_of(caught.value)
    assert failure.code == "overloaded"
    assert failure.retry_after_seconds is not None
