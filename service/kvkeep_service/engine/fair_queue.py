"""Who is next: tenants in turn, and those of one tenant in the order they came."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class OfTenant(Protocol):
    """Something that belongs to a tenant."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        ...


Item = TypeVar("Item", bound=OfTenant)


class FairQueue(Generic[Item]):
    """Lines of waiting items, one for each tenant that has any. Not safe in several threads.

    Every tenant counts the same, however many it brings.
    """

    def __init__(self) -> None:
        """Start empty."""
        # The tenant whose turn it is stands first.
        self._lines: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Item]:
        """All items, those of one tenant together."""
        for line in self._lines.values():
            yield from line

    def put(self, item: Item) -> None:
        """Let an item wait behind those of its tenant; a tenant that is new, behind the others."""
        self._lines.setdefault(item.tenant, deque()).append(item)

    def take(self) -> Item:
        """Remove and return the next item. Raises: KeyError when there is none."""
        tenant, line = next(iter(self._lines.items()), (None, None))
        if tenant is None or line is None:
            raise KeyError("nothing waits")
        item = line.popleft()
        if line:
            self._lines.move_to_end(tenant)
        else:
            del self._lines[tenant]
        return item

    def displaced_by(self, item: Item) -> Item | None:
        """Remove the newest item of the longest line, if that is longer than this one would be.

        So a tenant that fills a bounded queue keeps nobody else out of it. None, and nothing
        removed, when the newcomer's own line is as long.
        """
        longest = max(self._lines.values(), key=len, default=None)
        own = self._lines.get(item.tenant, ())
        if longest is None or len(longest) <= len(own) + 1:
            return None
        return longest.pop()

    def discard(self, is_unwanted: Callable[[Item], bool]) -> None:
        """Remove every item of which this holds; nobody's turn changes."""
        for tenant, line in list(self._lines.items()):
            kept = deque(item for item in line if not is_unwanted(item))
            if kept:
                self._lines[tenant] = kept
            else:
                del self._lines[tenant]

    def clear(self) -> None:
        """Remove everything."""
        self._lines.clear()
