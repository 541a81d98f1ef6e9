from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvkeep_storage.artifact import CacheRows, LayerRows
from kvkeep_storage.errors import Invalid

from ...support.caches import random_rows


def _with_layer(rows: CacheRows, **changes: object) -> CacheRows:
    first = replace(rows.layers[0], **changes)  # type: ignore[arg-type]
    return replace(rows, layers=(first, *rows.layers[1:]))


def _one_row_less(rows: CacheRows) -> CacheRows:
    layer = rows.layers[0]
    return _with_layer(rows, k=layer.k[:-1])


BROKEN: dict[str, Callable[[CacheRows], CacheRows]] = {
    "ratios: a cache": lambda rows: replace(rows, ratios=()),
    "ratios: must ascend": lambda rows: replace(rows, ratios=(0.1, 0.1, 0.3)),
    "ratios: each": lambda rows: replace(rows, ratios=(0.1, 0.2, 1.5)),
    "dtype": lambda rows: replace(rows, dtype="float64"),  # type: ignore[arg-type]
    "num_kv_heads": lambda rows: replace(rows, num_kv_heads=0),
    "counts: int32": lambda rows: replace(rows, counts=rows.counts.astype(np.int64)),
    r"counts: int32 \(3, 2, 2\)": lambda rows: replace(rows, counts=rows.counts[:2]),
    "counts, protected: never": lambda rows: replace(rows, counts=-rows.counts),
    "protected: int32": lambda rows: replace(rows, protected=rows.protected[:1]),
    "protected: band 0": lambda rows: replace(rows, protected=rows.protected + 100),
    r"layers\.000\.k": _one_row_less,
    r"layers\.000\.v": lambda rows: _with_layer(rows, v=rows.layers[0].v[:, :-1]),
    r"layers\.000\.v: contiguous": lambda rows: _with_layer(rows, v=rows.layers[0].v[:, ::-1]),
    r"layers\.000\.position: int32": lambda rows: _with_layer(
        rows, position=rows.layers[0].position[1:]
    ),
    r"layers\.000\.position: never": lambda rows: _with_layer(
        rows, position=rows.layers[0].position - 20_000
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_rows_that_disagree_with_themselves_are_refused_by_name(message: str) -> None:
    with pytest.raises(Invalid, match=f"^{message}"):
        BROKEN[message](random_rows())


def test_lengths_and_sizes_follow_from_the_counts() -> None:
    rows = random_rows(dtype="float16", head_dim=16)
    assert rows.row_bytes == 32
    assert rows.num_layers == 2
    np.testing.assert_array_equal(rows.length(1), rows.counts[:, 1].sum(axis=0))
    total = int(rows.counts.sum())
    assert rows.size_bytes == total * (2 * 32 + 4)


def test_a_layer_may_hold_nothing() -> None:
    counts = np.zeros((1, 1, 2), np.int32)
    rows = random_rows(counts=counts, ratios=(0.5,), protected_rows=0)
    assert isinstance(rows.layers[0], LayerRows)
    assert rows.size_bytes == 0
