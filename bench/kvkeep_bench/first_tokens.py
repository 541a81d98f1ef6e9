"""Seconds to the first token about one document: resident, from each tier, and read again.

*Cold* says that the pages of the files, the S3 server's own as well, were dropped from memory.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from kvkeep_bench.engine import EngineSide
from kvkeep_bench.models import find_model
from kvkeep_bench.report import Figure, ratio_of
from kvkeep_bench.samples import Samples, progress
from kvkeep_bench.stock import CHUNK_TOKENS, StockModel
from kvkeep_bench.stored import StoredCache, committed, forget_pages
from kvkeep_bench.transfers import repeated
from kvkeep_service.config import load_settings
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.plan import band_ratios
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.objects import Objects
from kvkeep_storage.sources import ObjectSource

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "tests" / "data" / "alice.txt"
QUESTION = "What did Alice see?"
RATIO = 0.3
_DISK_BYTES = 2**30
_AGAIN = "re-prefill, first token"
Bring: TypeAlias = Callable[[], Awaitable[ResidentContext]]
_WAYS = ("resident", "disk cache", "local store, cold", "S3, cold")


class FirstTokens:
    """SmolLM2's cache of one document, asked from everywhere."""

    def __init__(self, s3_url: str, s3_data: Path, data: Path, samples: Samples) -> None:
        """``s3_data`` is where the S3 server keeps its files, so that pages can be dropped."""
        torch.set_num_threads(os.cpu_count() or 1)
        model = find_model("smollm2")
        if model is None:
            raise RuntimeError("SmolLM2 is bundled and must be there")
        self._engine = EngineSide(model.reference, load_settings().model_cache)
        self._stock = StockModel(model.directory, self._engine.loaded.language_model.dtype)
        self._remote = Objects.open(s3_url)
        self._s3_data, self._data = s3_data, data
        self._samples = samples

    async def measure(self, tokens: int, repeats: int) -> None:
        """Build once, then ask in turns. Modifies: the samples."""
        progress("building SmolLM2's cache")
        engine = self._engine
        # Past the title page and the contents.
        text = engine.cut(DOCUMENT.read_text()[2000:], tokens)
        plan = engine.plan(text, "local", RATIO)
        built = engine.build(plan, band_ratios(RATIO))
        ids = [*plan.document.prefix_ids, *plan.document.ids, *engine.question_ids(QUESTION)]
        asked = torch.tensor([ids])
        async with committed(self._data, engine, text, plan, built) as stored:
            await _copy(stored, self._remote, self._data / "objects")
            disk = DiskTier.open(self._remote, self._data / "disk", _DISK_BYTES)
            try:
                await _fill(stored, disk)
                ways = self._ways(stored, built.context, disk)
                for here in repeated(self._samples, repeats):
                    progress("first tokens")
                    await self._ask(ways, here)
                    answer = self._stock.generate(asked, 2, CHUNK_TOKENS)
                    here.add(_AGAIN, answer.first_token_s)
            finally:
                await disk.close()

    def _ways(
        self, stored: StoredCache, resident: ResidentContext, disk: DiskTier
    ) -> Mapping[str, Bring]:
        async def here() -> ResidentContext:
            return resident

        async def from_disk_cache() -> ResidentContext:
            return await stored.load(disk)

        async def from_local() -> ResidentContext:
            stored.forget_pages()
            return await stored.load()

        async def from_s3() -> ResidentContext:
            forget_pages(self._s3_data)
            return await stored.load(ObjectSource(self._remote))

        return dict(zip(_WAYS, (here, from_disk_cache, from_local, from_s3), strict=True))

    async def _ask(self, ways: Mapping[str, Bring], samples: Samples) -> None:
        for way, bring in ways.items():
            loading = Samples()
            with loading.timed("load"):
                context = await bring()
            answer = self._engine.ask(context.view(RATIO), QUESTION, 1)
            load_s = loading.median("load")
            samples.add(f"{way}, first token", load_s + answer.first_token_s)


def first_token_figures(samples: Samples) -> list[Figure]:
    """Each way against reading the document again."""
    return [
        ratio_of(f"first token, {way} / re-prefill", samples, f"{way}, first token", _AGAIN)
        for way in _WAYS
    ]


async def _copy(stored: StoredCache, remote: Objects, root: Path) -> None:
    """Put the objects of the cache under the same keys into another store."""
    for path in stored.folder.iterdir():
        await remote.put(str(path.relative_to(root)), path.read_bytes())


async def _fill(stored: StoredCache, disk: DiskTier) -> None:
    """Load until nothing comes from the store any more."""
    misses = -1
    while disk.stats().filling or disk.stats().misses != misses:
        misses = disk.stats().misses
        await stored.load(disk)
