"""Reading the slabs of one generation in parallel ranges, straight to where their rows belong.

A part (one layer of one slab) counts only when every byte of it has matched its digest in
place: taken by the thread that has just read it (``part_digests.py``). What failed is read again
into the same buffers, but only when nothing else may write there: a read that was given up at
its deadline ends the whole reading with ``StillWriting``.
"""

import asyncio
from functools import partial

import numpy as np

from kvkeep_storage.arrival import Announcer, ArrivingRows
from kvkeep_storage.concurrency import run_together
from kvkeep_storage.doubts import Doubts
from kvkeep_storage.errors import Corrupt, ObjectsUnavailable
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.layer_parts import LayerPart, empty_layers, layer_parts
from kvkeep_storage.manifest import Manifest
from kvkeep_storage.part_digests import PartDigest, RangeDigests
from kvkeep_storage.range_plan import RangeRead, Run, plan_ranges
from kvkeep_storage.retries import retrying
from kvkeep_storage.slab_layout import SlabLayout, read_layout
from kvkeep_storage.sources import Source
from kvkeep_storage.spare_memory import Room, cleared_ahead

PARALLEL_READS = 8


class StillWriting(Exception):
    """A read was given up and may still write into the buffers: they are lost."""

    def __init__(self, error: ObjectsUnavailable) -> None:
        """``error`` is what the read ended with."""
        super().__init__(str(error))
        self.error = error


class Reading:
    """One set of buffers and the slabs that fill it. For one task; used once."""

    def __init__(
        self,
        source: Source,
        key: GenerationKey,
        manifest: Manifest,
        bands: int,
        doubts: Doubts,
        room_for: Room,
    ) -> None:
        """Make room for the first ``bands`` bands of a generation."""
        counts = manifest.counts_array()[:bands]
        self.rows = ArrivingRows(
            manifest.dtype,
            manifest.num_kv_heads,
            manifest.head_dim,
            manifest.ratios[:bands],
            counts,
            manifest.protected_array(),
            empty_layers(
                counts,
                manifest.row_bytes,
                manifest.quantization,
                cleared_ahead(room_for),
                remainder_row_bytes=manifest.plain_row_bytes * manifest.remainder_rows,
            ),
            manifest.quantization,
        )
        self._source = source
        self._key = key
        self._manifest = manifest
        self._doubts = doubts

    async def read(self, bands: range, announcer: Announcer | None) -> None:
        """Read and verify every part of some bands. Modifies: their rows in ``rows``.

        ``announcer`` hears of each part.
        Raises: Corrupt when bytes are proven wrong; NotFound; ObjectsUnavailable after bounded
        retries; StillWriting.
        """
        if not bands:
            return
        found = await run_together(
            (self._doubts.settle(partial(self._layout, band)) for band in bands),
            limit=PARALLEL_READS,
        )
        layouts = dict(zip(bands, found, strict=True))
        missing = await asyncio.to_thread(layer_parts, self.rows.counts, self.rows.layers, bands)
        runs = await asyncio.to_thread(plan_ranges, layouts, missing)
        while missing := await self._pass(runs, missing, announcer):
            runs = await asyncio.to_thread(plan_ranges, layouts, missing)

    async def _layout(self, band: int) -> SlabLayout:
        """Check the size of a slab, and its header."""
        name, slab = self._key.slab(band), self._manifest.slabs[band]

        async def read_header() -> memoryview:
            # New memory for each try, so that a read that still writes does no harm.
            header = np.empty(slab.header_bytes, np.uint8).data
            looks = (self._source.size(name), self._source.read_ranges(name, 0, [header]))
            stored_bytes, _ = await run_together(looks, limit=len(looks))
            if stored_bytes != slab.size_bytes:
                reason = f"{stored_bytes} bytes are stored, {slab.size_bytes} were written"
                raise Corrupt(name, reason)
            return header

        manifest = self._manifest
        counts = self.rows.counts[band]
        try:
            header = await retrying(read_header)
            return read_layout(
                header,
                slab.digests,
                counts,
                manifest.dtype,
                manifest.head_dim,
                quantization=manifest.quantization,
                band=band,
                remainder_rows=manifest.remainder_rows,
            )
        except Corrupt as error:
            raise _within(name, error) from error

    async def _pass(
        self,
        runs: list[Run],
        missing: list[LayerPart],
        announcer: Announcer | None,
    ) -> list[LayerPart]:
        """Read parts once, as planned; return those that were wrong, for another pass.

        A pass goes to its end before wrong bytes are weighed, so that the next one has each of
        them to read again and no other.
        """
        digests = {part: PartDigest(sum(part.sizes)) for part in missing}
        # What the other runs of a band go on from; the first comes before them.
        begun = {run[0].band: asyncio.Event() for run in runs}
        first = {run[0].band: run for run in reversed(runs)}
        verified: set[LayerPart] = set()
        # By what was found, because many ranges may meet the same end of a file.
        errors: dict[tuple[str, str], Corrupt] = {}

        async def work(run: Run) -> None:
            band = run[0].band
            if run is not first[band]:
                await begun[band].wait()
            try:
                for read in run:
                    for part in await self._fill(read, digests):
                        found = self._wrong(part, digests[part].hexdigest())
                        if found is not None:
                            errors[found.name, found.reason] = found
                            continue
                        verified.add(part)
                        if announcer is not None:
                            announcer.verified(part.layer, self.rows, self._manifest)
            except Corrupt as error:
                errors[error.name, error.reason] = error
            finally:
                begun[band].set()

        await run_together((work(run) for run in runs), limit=PARALLEL_READS)
        for error in errors.values():
            await self._doubts.weigh(error)
        return [part for part in missing if part not in verified]

    async def _fill(self, read: RangeRead, digests: dict[LayerPart, PartDigest]) -> list[LayerPart]:
        """Read a range, and add it to the digests of its parts; return those that are whole.

        Raises: Corrupt when the slab ends too early; StillWriting; as a source's reads.
        """
        name = self._key.slab(read.band)

        async def once() -> RangeDigests:
            adding = RangeDigests(read, digests)
            try:
                await self._source.read_ranges(name, read.start, read.into, adding.filled)
            except ObjectsUnavailable as error:
                if error.abandoned:
                    raise StillWriting(error) from error
                raise
            return adding

        try:
            adding = await retrying(once)
        except Corrupt as error:
            raise Corrupt(name, "it ends too early") from error
        if not adding.is_complete:
            await asyncio.to_thread(adding.digest_in_place)
        return adding.commit()

    def _wrong(self, part: LayerPart, found: str) -> Corrupt | None:
        digest = self._manifest.slabs[part.band].layer_digests[part.layer]
        try:
            part.check(found, digest, self.rows.counts[part.band, part.layer])
        except Corrupt as error:
            return _within(self._key.slab(part.band), error)
        return None


def _within(name: str, error: Corrupt) -> Corrupt:
    """The same error, named with its object."""
    return error if error.name == name else Corrupt(f"{name}: {error.name}", error.reason)
