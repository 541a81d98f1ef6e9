"""Rows go from the engine to the store and back bit for bit, in every layout and dtype."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvkeep_kernels.layout import ContextRows, Placement
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.engine.decode import SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.policies.kvzip import KVzip
from kvkeep_service.rows import to_engine, to_store
from kvkeep_service.stores import Stores
from kvkeep_storage.artifact import CacheRows, Quantization
from kvkeep_storage.manifest import ManifestFacts
from kvkeep_storage.records import CacheRecord

from ...support.caches import facts_for
from ...support.stores import Stores as Storage
from .engine.gated import PROMPTS, answer_alone, sequence
from .engine.models import WINDOW, engine_model, random_document, run_build, stock_model

RATIOS = (0.05, 0.1, 0.3)
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def model_in(dtype: torch.dtype) -> LanguageModel:
    inner = engine_model(stock_model("qwen3"))
    # Half precision needs smaller numbers than these random weights give.
    return LanguageModel(inner._model.to(dtype), inner.shape)


def a_build(
    model: LanguageModel,
    ratios: tuple[float, ...] = RATIOS,
    quantization: Quantization = "none",
) -> BuiltCache:
    document = random_document(400, prefix=6, seed=4)
    protected = document.protected.clone()
    protected[100:120] = True
    document = DocumentTokens(document.prefix_ids, document.ids, protected)
    remainder = not model.shape.windows
    policy = KVzip(PROMPTS, scoring="local", chunk_tokens=128, remainder=remainder)
    return run_build(model, document, policy, ratios, quantization)


@pytest.fixture
async def storage(stores: Stores, tmp_path: Path) -> Storage:
    return await Storage.open(tmp_path, stores.metadata)


async def committed(storage: Storage, rows: CacheRows) -> tuple[ManifestFacts, CacheRecord]:
    facts = facts_for(rows)
    await storage.register(facts)
    return facts, await storage.build(rows, facts)


def assert_same_rows(ours: ContextRows, theirs: ContextRows) -> None:
    assert type(ours) is type(theirs)
    for field in fields(ours):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(here, torch.Tensor):
            assert here.dtype == there.dtype
            # Bits, not values: equal says nothing of a zero's sign.
            assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))
        elif isinstance(here, Placement):
            assert torch.equal(here.positions, there.positions)
            assert here.end == there.end
        else:
            assert here == there


def assert_same_remainders(ours: ResidentContext, theirs: ResidentContext, ratio: float) -> None:
    """What a tail begins with at a ratio."""
    pairs = list(zip(ours.view(ratio).lead, theirs.view(ratio).lead, strict=True))
    assert len(pairs) == len(ours.layers)
    for here, there in pairs:
        for mine, other in ((here.k, there.k), (here.v, there.v)):
            assert mine.any()
            assert mine.dtype == other.dtype
            same = mine.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
            assert same.all()


def assert_same_runs(ours: ResidentContext, theirs: ResidentContext, ratio: float) -> None:
    """Every head's rows at a ratio, wherever its run stands in the buffers."""
    pairs = zip(ours.view(ratio).layers, theirs.view(ratio).layers, strict=True)
    for here, there in pairs:
        assert torch.equal(here.length, there.length)
        for head in range(here.num_kv_heads):
            for mine, other in zip(here.head_rows(head), there.head_rows(head), strict=True):
                assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.anyio
async def test_field_19_engine_to_store_to_engine_is_bit_for_bit(
    storage: Storage, dtype: torch.dtype, quantization: Quantization
) -> None:
    built = a_build(model_in(dtype), quantization=quantization)
    facts, _ = await committed(storage, to_store(built))
    loaded = await storage.load(facts)
    context = to_engine(loaded.rows, built.context.num_tokens, CPU)
    for ours, theirs in zip(context.layers, built.context.layers, strict=True):
        assert ours.k.any()
        assert_same_rows(ours, theirs)
    for ratio in RATIOS:
        assert_same_remainders(context, built.context, ratio)
    assert torch.equal(context.counts, built.context.counts)
    assert (context.ratios, context.num_tokens) == (RATIOS, 406)
    assert context.size_bytes == built.context.size_bytes


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["gemma3", "ministral"])
@pytest.mark.anyio
async def test_windows_come_back_bit_for_bit_at_every_ratio_and_answer_alike(
    storage: Storage, kind: str, quantization: Quantization
) -> None:
    model = engine_model(stock_model(kind))
    windows = model.shape.windows
    built = a_build(model, quantization=quantization)
    rows = to_store(built)
    facts, _ = await committed(storage, rows)
    for ratio in RATIOS:
        loaded = await storage.load(facts, ratio)
        context = to_engine(loaded.rows, built.context.num_tokens, CPU, windows)
        if quantization == "none":
            assert_same_runs(context, built.context, ratio)
        for index, window in enumerate(windows):
            if window is None:
                continue
            # The last W - 1 positions of every head, whatever the ratio; none may be evicted.
            ends = torch.arange(406 - (window - 1), 406, dtype=torch.int32).repeat(2)
            assert torch.equal(context.layers[index].placement.positions, ends)
            assert loaded.rows.protected[index].tolist() == [window - 1] * 2
    # Longer than a window, so that the tail slides out of it too.
    question, options = [5, 6, 7, 8], SequenceOptions(WINDOW)
    warm, cold = (
        answer_alone(model, sequence(model, where.view(ratio), question, options))
        for where in (built.context, context)
    )
    assert warm == cold
    for ours, theirs in zip(context.layers, built.context.layers, strict=True):
        assert_same_rows(ours, theirs)
    selected = built.selection
    assert selected.num_eligible == 380 * 2 * windows.count(None)
    assert selected.num_selected == round(RATIOS[-1] * selected.num_eligible)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.anyio
async def test_a_quantised_row_does_not_depend_on_the_ratio_others_asked_for(
    storage: Storage, quantization: Quantization
) -> None:
    model = model_in(torch.float32)
    large = a_build(model, quantization=quantization)
    small = a_build(model, RATIOS[:2], quantization)
    facts, _ = await committed(storage, to_store(large))
    context = to_engine((await storage.load(facts, 0.1)).rows, large.context.num_tokens, CPU)
    for ours, theirs in zip(context.layers, small.context.layers, strict=True):
        assert_same_rows(ours, theirs)
    question, options = [5, 6, 7, 8], SequenceOptions(24)
    answers = [
        answer_alone(model, sequence(model, view, question, options))
        for view in (context.view(0.1), small.context.view(0.1), large.context.view(0.1))
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_on_a_cpu_quantised_rows_are_not_copied_either(quantization: Quantization) -> None:
    built = a_build(model_in(torch.float32), quantization=quantization)
    rows = to_store(built)
    assert rows.quantization == quantization
    context = to_engine(rows, 406, CPU)
    for layer, stored, back in zip(built.context.layers, rows.layers, context.layers, strict=True):
        assert layer.k.data_ptr() == stored.k.ctypes.data == back.k.data_ptr()
        scale = stored.scales.v_scale
        assert layer.v_scale.data_ptr() == scale.ctypes.data == back.v_scale.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.anyio
async def test_stored_k_and_v_take_exactly_rows_times_two_row_bytes(
    storage: Storage, dtype: torch.dtype
) -> None:
    built = a_build(model_in(dtype))
    _, cache = await committed(storage, to_store(built))
    stored = {"k": 0, "v": 0}
    slabs = sorted(storage.folder(cache).glob("*.safetensors"))
    assert len(slabs) == len(RATIOS)
    for slab in slabs:
        with safe_open(slab, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                kind = name.rpartition(".")[2]
                if kind in stored:
                    stored[kind] += file.get_tensor(name).nbytes
    selection = built.selection
    heads = 3 * 2
    # 0.3 of what may be evicted, and prefix and protected span in every head.
    num_rows = round(0.3 * heads * 380) + heads * 26
    assert sum(len(positions) for positions in selection.positions) == num_rows
    row_bytes = 16 * dtype.itemsize
    assert stored == {"k": num_rows * row_bytes, "v": num_rows * row_bytes}


@pytest.mark.anyio
async def test_slabs_up_to_a_tenth_are_the_cache_built_at_a_tenth(storage: Storage) -> None:
    model = model_in(torch.float32)
    large, small = a_build(model), a_build(model, RATIOS[:2])
    facts, _ = await committed(storage, to_store(large))
    loaded = await storage.load(facts, 0.1)
    assert loaded.rows.ratios == RATIOS[:2]
    context = to_engine(loaded.rows, large.context.num_tokens, CPU)
    for ours, theirs in zip(context.layers, small.context.layers, strict=True):
        assert_same_rows(ours, theirs)
    assert_same_runs(context, large.context, 0.1)
    assert_same_runs(context, large.context, 0.05)

    question, options = [5, 6, 7, 8], SequenceOptions(24)
    answers = [
        answer_alone(model, sequence(model, view, question, options))
        for view in (context.view(0.1), small.context.view(0.1), large.context.view(0.1))
    ]
    assert answers[0] == answers[1] == answers[2]
    whole = answer_alone(model, sequence(model, large.context.view(0.3), question, options))
    assert whole != answers[0], "ratios that answer alike would hide a wrong one"


def test_positions_and_protection_travel_with_the_rows() -> None:
    built = a_build(model_in(torch.float32))
    rows = to_store(built)
    assert rows.protected.tolist() == [[26, 26]] * 3
    fixed = [*range(6), *range(106, 126)]
    for index, layer in enumerate(rows.layers):
        starts = np.cumsum(rows.length(index)) - rows.length(index)
        for start, length in zip(starts, rows.length(index), strict=True):
            run = layer.position[start : start + length].tolist()
            assert run[:26] == fixed
            assert len(set(run)) == length


def test_on_a_cpu_nothing_is_copied_either_way() -> None:
    built = a_build(model_in(torch.float32))
    rows = to_store(built)
    context = to_engine(rows, 406, CPU)
    for layer, stored, back in zip(built.context.layers, rows.layers, context.layers, strict=True):
        assert layer.k.data_ptr() == stored.k.ctypes.data == back.k.data_ptr()
        assert layer.v.data_ptr() == stored.v.ctypes.data == back.v.data_ptr()


def test_a_cache_that_evicts_nothing_makes_the_same_way() -> None:
    built = run_build(model_in(torch.bfloat16), random_document(30), None, (1.0,))
    rows = to_store(built)
    assert rows.ratios == (1.0,)
    context = to_engine(rows, 35, CPU)
    for ours, theirs in zip(context.layers, built.context.layers, strict=True):
        assert_same_rows(ours, theirs)
