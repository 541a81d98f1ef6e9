"""What the disk tier leaves alone for a while: a disk that fails, and copies that were wrong."""

import errno
import logging
import time
from typing import Final

_log = logging.getLogger(__name__)

# After the disk has failed, or an object could not be kept, it is not tried for so long.
_PAUSE_SECONDS: Final = 30.0
# Longer than a load takes that has just found wrong bytes.
_DISTRUST_SECONDS: Final = 600.0
_REFUSALS_KEPT: Final = 1024


class DiskHealth:
    """Remembers what went wrong with the disk of one tier, in this process. No I/O."""

    def __init__(self) -> None:
        """A disk that nothing is known against."""
        self.errors = 0
        self.forgotten = 0
        self._reads_again_at = 0.0
        self._fills_again_at = 0.0
        self._refused: dict[str, float] = {}
        self._distrusted: dict[str, float] = {}

    def may_read(self, prefix: str) -> bool:
        """Whether copies of a generation may be used and made."""
        now = time.monotonic()
        return now >= self._reads_again_at and now >= self._distrusted.get(prefix, 0.0)

    def may_fill(self, key: str) -> bool:
        """Whether an object that is not here may be fetched to the disk."""
        now = time.monotonic()
        return now >= self._fills_again_at and now >= self._refused.get(key, 0.0)

    def refuse(self, key: str) -> None:
        """Do not fetch an object to the disk again at once, with every read of it."""
        if len(self._refused) >= _REFUSALS_KEPT:
            # Each costs one attempt in vain at most.
            self._refused.clear()
        self._refused[key] = time.monotonic() + _PAUSE_SECONDS

    def distrust(self, prefix: str) -> None:
        """Do not use copies of a generation for ten minutes: bytes of it were wrong."""
        now = time.monotonic()
        self._distrusted = {name: end for name, end in self._distrusted.items() if end > now}
        self._distrusted[prefix] = now + _DISTRUST_SECONDS
        self.forgotten += 1
        _log.warning("wrong bytes were read, and are read from the store next: %s", prefix)

    def has_failed(self, error: OSError, *, is_write: bool) -> None:
        """Leave the disk alone; one that is full, or read-only, can still be read."""
        self.errors += 1
        self._fills_again_at = time.monotonic() + _PAUSE_SECONDS
        if not is_write:
            self._reads_again_at = self._fills_again_at
        what = "written" if is_write else "used"
        reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
        _log.warning("the disk cache is not %s for %.0f s: %s", what, _PAUSE_SECONDS, reason)

    def was_cut_short(self, key: str) -> None:
        """A copy ends too early; its caller removes it."""
        self.errors += 1
        _log.warning("cut short in the disk cache, and removed: %s", key)
