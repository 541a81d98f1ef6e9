"""A process without torch that commits one synthetic cache, and is killed where it is told.

Run as ``python -m tests.fault.commit_process REDIS_URL OBJECTS_DIRECTORY STEP``. Prints the code
of the storage error that ended it, if one did.
"""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkeep_storage.commit import commit
from kvkeep_storage.errors import StorageError
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import BuildLease, CacheRecord

from ..support.caches import facts_for, random_rows
from ..support.stores import Stores

ROWS = random_rows(head_dim=64, rows_max=40)
FACTS = facts_for(ROWS)

# In the order in which a commit passes them; the number is the step of the protocol.
BEFORE_FLIP = (
    "2 document stored",
    "1 lease taken",
    "3 before any slab",
    "3 slab written, not yet renamed",
    "3 first slab put",
    "4 before sizes",
    "5 before manifest",
    "5 manifest written, not yet linked",
    "5 manifest linked, temporary file not yet removed",
    "5 manifest put",
    "6 before flip",
)
AFTER_FLIP = ("6 flipped", "6 mirror written, not yet renamed", "6 mirrored")
NO_SPACE = "file size limited"
# Room for the first slab (25,364 bytes) and the second, not for the third (27,444).
_LIMIT_BYTES = 26_000

STEP = ""


def reached(step: str) -> None:
    """Die on the spot when this is the step."""
    if step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledObjects(Objects):
    async def put(self, key: str, content: bytes) -> None:
        if "kv-" in key:
            reached("3 before any slab")
        await super().put(key, content)
        if "kv-" in key:
            reached("3 first slab put")
        if key.endswith("context.json"):
            reached("6 mirrored")

    async def size(self, key: str) -> int:
        reached("4 before sizes")
        return await super().size(key)

    async def put_if_absent(self, key: str, content: bytes) -> None:
        reached("5 before manifest")
        await super().put_if_absent(key, content)
        reached("5 manifest put")


class KilledMetadata(Metadata):
    async def flip(self, cache: CacheRecord, *, lease: BuildLease, now: float) -> list[str]:
        reached("6 before flip")
        ready = await super().flip(cache, lease=lease, now=now)
        reached("6 flipped")
        return ready


def die_inside_the_file_system() -> None:
    """Die between the system calls that make a file visible."""

    def around(call: Callable[..., Any], before: Callable[[str], str], after: str) -> Any:
        def patched(source: Path, target: Path, *args: Any, **kwargs: Any) -> None:
            reached(before(str(target)))
            call(source, target, *args, **kwargs)
            reached(after)

        return patched

    def renaming(target: str) -> str:
        what = "6 mirror" if target.endswith("context.json") else "3 slab"
        return f"{what} written, not yet renamed"

    os.replace = around(os.replace, renaming, "")
    os.link = around(
        os.link,
        lambda _: "5 manifest written, not yet linked",
        "5 manifest linked, temporary file not yet removed",
    )


async def main(redis_url: str, root: str) -> None:
    """Build the cache of the context that the test registered."""
    metadata = await KilledMetadata.connect(redis_url)
    stores = await Stores.open(Path(root), metadata)
    stores.objects = KilledObjects.open(f"file://{root}")
    reached("2 document stored")
    lease = await stores.lease(FACTS)
    reached("1 lease taken")
    die_inside_the_file_system()
    if STEP == NO_SPACE:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT_BYTES, _LIMIT_BYTES))
    try:
        await commit(stores.objects, metadata, stores.leases, lease, ROWS, FACTS)
    except StorageError as error:
        sys.stdout.write(error.code)
    await metadata.close()


if __name__ == "__main__":
    STEP = sys.argv[3]
    asyncio.run(main(sys.argv[1], sys.argv[2]))
    if "torch" in sys.modules:
        sys.exit("storage imported torch")
