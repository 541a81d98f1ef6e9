"""What is asked of a Redis before it is trusted with records: its version, and what it evicts."""

import logging
from collections.abc import Mapping
from typing import Final

from kvkeep_storage.errors import Incompatible
from kvkeep_storage.redis_link import RedisLink

_log = logging.getLogger(__name__)

# Functions of scripts and streams that the records need came with this one.
_MAJOR_VERSION_MIN: Final = 7


async def check_server(link: RedisLink) -> None:
    """Look at every primary; warn of one that may evict records.

    A user that may not ask (INFO forbidden or renamed) is no trouble: a line for debugging.
    Raises: Incompatible for a version below 7; MetadataUnavailable.
    """
    infos = await link.infos()
    if infos is None:
        _log.debug("INFO is not allowed: neither version nor maxmemory-policy were checked")
        return
    for info in infos:
        _check_version(info)
    policies = {info.get("maxmemory_policy", "") for info in infos} - {"", "noeviction"}
    for policy in sorted(policies):
        _log.warning(
            "maxmemory-policy is %s: Redis may evict %s; set it to noeviction",
            policy,
            "leases and idempotency keys" if policy.startswith("volatile-") else "any record",
        )


def _check_version(info: Mapping[str, str]) -> None:
    # Valkey names the version of Redis it is compatible with, too.
    version = info.get("redis_version", "")
    major, _, _ = version.partition(".")
    if not major.isdecimal():
        _log.debug("the version of Redis cannot be read: %r", version)
    elif int(major) < _MAJOR_VERSION_MIN:
        raise Incompatible("Redis version", version, f"{_MAJOR_VERSION_MIN} or newer")
