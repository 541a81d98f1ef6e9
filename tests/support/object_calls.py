"""Everything that can be asked of an object store, to see how each of it fails."""

from collections.abc import Awaitable, Callable

from kvkeep_storage.objects import Objects


def every_call(store: Objects, content: bytes) -> list[Callable[[], Awaitable[object]]]:
    """Calls on objects ``x`` and ``y``; a transfer is of ``content``, or as long."""
    return [
        lambda: store.get("x"),
        lambda: store.put("x", content),
        lambda: store.put_if_absent("y", b"1"),
        lambda: store.size("x"),
        lambda: store.delete("x"),
        lambda: store.objects_below("a"),
        lambda: store.directories_below("a"),
        lambda: store.read_ranges("x", 0, [memoryview(bytearray(len(content)))]),
        lambda: store.check(deadline_seconds=1.5),
    ]
