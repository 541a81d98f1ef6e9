"""Slabs read back into memory as a load does it, without a store or a loop around it."""

from dataclasses import replace

import numpy as np

from kvkeep_storage.artifact import CacheRows, LayerRows, row_bytes
from kvkeep_storage.layer_parts import empty_layers, layer_parts
from kvkeep_storage.part_digests import PartDigest, RangeDigests
from kvkeep_storage.range_plan import plan_ranges
from kvkeep_storage.slab import EncodedSlab
from kvkeep_storage.slab_layout import SlabLayout, read_layout


def layout_of(rows: CacheRows, band: int, slab: EncodedSlab) -> SlabLayout:
    """Verify and read the header of a slab as that of a band of these rows."""
    return read_layout(
        memoryview(slab.content)[: slab.digests.header_bytes],
        slab.digests,
        rows.counts[band],
        rows.dtype,
        rows.head_dim,
        quantization=rows.quantization,
        band=band,
        remainder_rows=rows.remainder_rows,
    )


def empty_layers_like(rows: CacheRows, bands: int) -> tuple[LayerRows, ...]:
    """Room for the first bands of these rows."""
    plain_row_bytes = row_bytes(rows.dtype, "none", rows.head_dim)
    return empty_layers(
        rows.counts[:bands],
        rows.row_bytes,
        rows.quantization,
        remainder_row_bytes=plain_row_bytes * rows.remainder_rows,
    )


def decode_slabs(rows: CacheRows, slabs: list[EncodedSlab]) -> CacheRows:
    """Read the first slabs back into memory, and verify them there."""
    bands = len(slabs)
    counts = rows.counts[:bands]
    layers = empty_layers_like(rows, bands)
    for layer in layers:
        # Every byte must come from a slab.
        layer.k.fill(0xFF)
        layer.v.fill(0xFF)
        layer.position.fill(-1)
        for part in layer.scales.of_rows if layer.scales else ():
            part.fill(np.nan)
        if layer.remainder is not None:
            layer.remainder.fill(0xFF)
    layouts = {band: layout_of(rows, band, slab) for band, slab in enumerate(slabs)}
    parts = layer_parts(counts, layers, range(bands))
    digests = {part: PartDigest(sum(part.sizes)) for part in parts}
    # Ranges may arrive in any order.
    for read in reversed([read for run in plan_ranges(layouts, parts) for read in run]):
        start = read.start
        for view in read.into:
            view[:] = slabs[read.band].content[start : start + len(view)]
            start += len(view)
        adding = RangeDigests(read, digests)
        adding.digest_in_place()
        adding.commit()
    for part in parts:
        assert digests[part].is_whole
        digest = slabs[part.band].digests.layer_digests[part.layer]
        part.check(digests[part].hexdigest(), digest, counts[part.band, part.layer])
    return replace(rows, ratios=rows.ratios[:bands], counts=counts, layers=layers)


def with_content(slab: EncodedSlab, content: bytes) -> EncodedSlab:
    """Other bytes under the digests of a slab."""
    return EncodedSlab(content, slab.digests)
