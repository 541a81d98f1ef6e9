"""The store against raw reads, a bare S3 client and re-prefill, in one run.

    .venv/bin/python bench/store.py [--mebibytes 256] [--repeats 5] [--tokens 2000]
    .venv/bin/python bench/store.py --only throughput

Every ratio is of medians, measured in turns in this run. Page caches are warm unless a name says
*cold*. Raw reads get new memory from the kernel, as they would in any program; loads get what the
load before them has given back, as in a server. Either is measured in the other's memory as well:
*new* and *used* say which. SeaweedFS runs on this machine and shares its
cores. Prints Markdown, and writes it to ``bench/results/store.md``. Takes some three minutes on
two cores, most of them for building SmolLM2's cache; without that, which ``--only throughput``
leaves out, less than one, and then the results go to ``store_throughput.md``.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

# The servers and synthetic facts of the tests serve here as well.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from kvkeep_bench.first_tokens import FirstTokens, first_token_figures
from kvkeep_bench.machine import Machine
from kvkeep_bench.report import Figure, ratio_of, tables
from kvkeep_bench.samples import Samples, progress
from kvkeep_bench.transfers import (
    DigestClock,
    Range,
    get_together,
    ranges_of,
    read_files,
    repeated,
    synthetic_rows,
    write_files,
)

from kvkeep_storage.artifact import CacheRows
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.generations import delete_generation
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.manifest import ManifestFacts
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.spare_memory import Room, SpareMemory, new_room
from tests.support.caches import facts_for
from tests.support.s3_servers import ACCESS_KEY, SECRET_KEY, S3Server, Seaweed
from tests.support.stores import Stores

RESULTS = Path(__file__).resolve().parent / "results"
_MB = 1e6
# Of a load and its digests: what one thread verifies, another one reads meanwhile.
_CPU = "CPU of all threads"


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    mebibytes: int
    repeats: int
    tokens: int
    throughput_only: bool


def main() -> None:
    options = parse_options()
    machine = Machine.here()
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as data:
        figures = asyncio.run(measure(options, samples, Path(data)))
    lines = [
        "# The store against what is below it",
        "",
        machine.line("bfloat16"),
        "",
        *tables(figures, samples),
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    name = "store_throughput.md" if options.throughput_only else "store.md"
    (RESULTS / name).write_text("\n".join(lines))
    print("\n".join(lines))


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="kvkeep's store against raw reads and writes")
    parser.add_argument("--mebibytes", type=int, default=256, help="of rows, 16 to 8192")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000, help="of the document, 300 to 7500")
    parser.add_argument("--only", choices=["throughput"], help="leave first tokens out")
    found = parser.parse_args()
    if not 16 <= found.mebibytes <= 8192 or found.repeats < 1:
        parser.error("--mebibytes must be 16 to 8192, --repeats at least 1")
    if not 300 <= found.tokens <= 7500:
        parser.error("--tokens must be 300 to 7500")
    return Options(found.mebibytes, found.repeats, found.tokens, found.only is not None)


async def measure(options: Options, samples: Samples, data: Path) -> list[Figure]:
    embedded = EmbeddedStore(data)
    embedded.start()
    seaweed = Seaweed(data / "seaweed")
    try:
        progress("starting SeaweedFS")
        await asyncio.to_thread(seaweed.start)
        os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        rows = synthetic_rows(options.mebibytes)
        await measure_local(rows, options.repeats, samples, data, embedded.redis_url)
        await measure_s3(rows, options.repeats, samples, data, embedded.redis_url, seaweed.server)
        figures = [*local_figures(samples, rows), *s3_figures(samples)]
        if options.throughput_only:
            return figures
        bench = FirstTokens(seaweed.server.url("model"), data / "seaweed", data / "model", samples)
        await bench.measure(options.tokens, options.repeats)
        return [*figures, *first_token_figures(samples)]
    finally:
        seaweed.kill()
        embedded.stop()


async def measure_local(
    rows: CacheRows, repeats: int, samples: Samples, data: Path, redis_url: str
) -> None:
    metadata = await Metadata.connect(redis_url)
    try:
        stores = await Stores.open(data / "local", metadata)
        facts = facts_for(rows)
        await stores.register(facts)
        cache = await stores.build(rows, facts)
        slabs = sorted(stores.folder(cache).glob("kv-*"))
        contents = [path.read_bytes() for path in slabs]
        (data / "raw").mkdir()
        used = SpareMemory()
        for here in repeated(samples, repeats):
            progress("commit, write, load and read on the local disk")
            cache = await _timed_commit(stores, rows, facts, cache, here)
            with here.timed("local, write and sync"):
                await asyncio.to_thread(write_files, data / "raw", contents)
            files = sorted(stores.folder(cache).glob("kv-*"))
            ranges = ranges_of({str(path): path.stat().st_size for path in files})
            await _timed_reads(stores, facts, ranges, here, "new", new_room)
            await _timed_reads(stores, facts, ranges, here, "used", used.room)
    finally:
        await metadata.link.command("FLUSHALL")
        await metadata.close()


async def _timed_reads(
    stores: Stores,
    facts: ManifestFacts,
    ranges: Sequence[Range],
    samples: Samples,
    memory: str,
    room_for: Room,
) -> None:
    # Giving memory back is outside of all times.
    with samples.timed(f"local, raw read, {memory} memory"):
        content = await asyncio.to_thread(read_files, ranges, room_for)
    del content
    with samples.timed(f"local, load, {memory} memory"):
        loaded = await stores.load(facts, room_for=room_for)
    del loaded
    # A load of its own, since clocks cost something as well.
    clock = DigestClock()
    started = time.process_time()
    with clock.on():
        loaded = await stores.load(facts, room_for=room_for)
    samples.add(f"local, load, {memory} memory, {_CPU}", time.process_time() - started)
    del loaded
    samples.add(f"local, digests, {memory} memory, {_CPU}", clock.seconds)


async def _timed_commit(
    stores: Stores, rows: CacheRows, facts: ManifestFacts, old: CacheRecord, samples: Samples
) -> CacheRecord:
    with samples.timed("local, commit"):
        cache = await stores.build(rows, facts)
    key = GenerationKey(old.tenant, old.cache_id, old.generation)
    await delete_generation(stores.objects, key)
    return cache


async def measure_s3(
    rows: CacheRows, repeats: int, samples: Samples, data: Path, redis_url: str, server: S3Server
) -> None:
    metadata = await Metadata.connect(redis_url)
    try:
        objects = Objects.open(server.url("bench"))
        await bind_if_new(objects, metadata)
        stores = Stores(objects, metadata, Leases(metadata), data)
        facts = facts_for(rows)
        await stores.register(facts)
        with samples.timed("S3, commit"):
            cache = await stores.build(rows, facts)
        key = GenerationKey(cache.tenant, cache.cache_id, cache.generation)
        names = [key.slab(band) for band in range(len(rows.ratios))]
        sizes = {name: await objects.size(name) for name in names}
        client = server.store("bench")
        used = SpareMemory()

        def get(part: Range) -> Awaitable[Sized]:
            return client.get_range_async(part.name, start=part.start, length=part.size_bytes)

        for here in repeated(samples, repeats):
            progress("load and get from SeaweedFS")
            with here.timed("S3, bare ranged GETs"):
                await get_together(get, ranges_of(sizes))
            with here.timed("S3, load"):
                loaded = await stores.load(facts, room_for=used.room)
            del loaded
    finally:
        await metadata.close()


def local_figures(samples: Samples, rows: CacheRows) -> list[Figure]:
    size = rows.size_bytes / _MB
    memories = ("new", "used")
    raw_new, raw_used = (f"local, raw read, {memory} memory" for memory in memories)
    new, used = (f"local, load, {memory} memory" for memory in memories)
    digests_new, digests = (f"local, digests, {memory} memory, {_CPU}" for memory in memories)
    return [
        Figure("GB/s of a local load", size / 1000 / samples.median(used), "", f"{size:.0f} MB"),
        ratio_of("local: throughput of a load / of raw reads", samples, raw_new, used, "≥ 0.7"),
        ratio_of("the same, both in new memory", samples, raw_new, new),
        ratio_of("the same, both in used memory", samples, raw_used, used),
        _digest_share(samples, digests, used),
        ratio_of("digests / local load, CPU time", samples, digests, f"{used}, {_CPU}"),
        ratio_of("the same, in new memory", samples, digests_new, f"{new}, {_CPU}"),
        ratio_of("commit / write and sync", samples, "local, commit", "local, write and sync"),
    ]


def _digest_share(samples: Samples, digests: str, load: str) -> Figure:
    """Part of a load's time, that of all cores, since one may read while another digests."""
    cores = os.cpu_count() or 1
    taken_s, load_s = samples.median(digests), samples.median(load)
    return Figure(
        "digests / local load, time of all cores",
        taken_s / (cores * load_s),
        "≤ 0.15",
        f"{1000 * taken_s:.1f} ms of {cores} times {1000 * load_s:.1f} ms {load}",
    )


def s3_figures(samples: Samples) -> list[Figure]:
    return [
        ratio_of(
            "S3: throughput of a load / of a bare client",
            samples,
            "S3, bare ranged GETs",
            "S3, load",
            "≥ 0.7",
        )
    ]


if __name__ == "__main__":
    main()
