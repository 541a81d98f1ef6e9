"""What became of the request with an idempotency key, for as long as its answer is kept."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvkeep_storage.errors import RecordCorrupt
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.redis_link import RedisTable, texts

# A process that dies inside a request leaves its key behind: after this time, the key is free.
IN_FLIGHT_SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class Started:
    """The key is new: carry out the request, then finish or abandon it."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The first request with this key has not been answered yet."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key was used with another body."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The first request was answered so; answer the same again."""

    status: int
    body: bytes
    headers: Mapping[str, str]


Outcome: TypeAlias = Started | InFlight | Mismatch | Replay

# KEYS key    ARGV digest keep_ms in_flight_ms
# -> {'started'} | {'in_flight'} | {'mismatch'} | {'replay', answer}
_BEGIN: Final = """
local digest = redis.call('HGET', KEYS[1], 'digest')
if not digest then
  redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'keep_ms', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return {'started'}
end
if digest ~= ARGV[1] then return {'mismatch'} end
local answer = redis.call('HGET', KEYS[1], 'answer')
if not answer then return {'in_flight'} end
return {'replay', answer}
"""

# KEYS key    ARGV answer    -> 1, or 0 when the key is free again
_FINISH: Final = """
local keep_ms = redis.call('HGET', KEYS[1], 'keep_ms')
if not keep_ms then return 0 end
redis.call('HSET', KEYS[1], 'answer', ARGV[1])
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1
"""

# KEYS key    -> 1, or 0 when there was nothing to abandon
_ABANDON: Final = """
if redis.call('HEXISTS', KEYS[1], 'answer') == 1 then return 0 end
return redis.call('DEL', KEYS[1])
"""


class IdempotencyTable(RedisTable):
    """One request per tenant and key, its answer kept. All methods raise MetadataUnavailable."""

    async def idempotency_begin(
        self, tenant: str, key: str, body_digest: str, ttl_seconds: float
    ) -> Outcome:
        """Claim a key for a request with this body, or learn what became of the first one.

        Two requests at once: exactly one starts. A started key that is neither finished nor
        abandoned is free again after IN_FLIGHT_SECONDS, or ``ttl_seconds`` when that is less.
        Raises: RecordCorrupt.
        """
        keep_ms = int(ttl_seconds * 1000)
        name = TenantKeys(tenant).idempotency(key)
        outcome, *rest = texts(
            await self._link.run(
                _BEGIN, [name], [body_digest, keep_ms, min(keep_ms, IN_FLIGHT_SECONDS * 1000)]
            )
        )
        if outcome == "replay":
            return _decode(name, rest[0])
        if outcome == "mismatch":
            return Mismatch()
        return Started() if outcome == "started" else InFlight()

    async def idempotency_finish(
        self, tenant: str, key: str, status: int, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Keep the answer of a started key for the time named at its start."""
        answer = json.dumps(
            {
                "status": status,
                "body": base64.b64encode(body).decode("ascii"),
                "headers": dict(headers),
            }
        )
        await self._link.run(_FINISH, [TenantKeys(tenant).idempotency(key)], [answer])

    async def idempotency_abandon(self, tenant: str, key: str) -> None:
        """Free a started key whose request failed before it changed anything."""
        await self._link.run(_ABANDON, [TenantKeys(tenant).idempotency(key)])


def _decode(name: str, text: str) -> Replay:
    try:
        answer = json.loads(text)
        return Replay(
            status=int(answer["status"]),
            body=base64.b64decode(answer["body"], validate=True),
            headers={str(header): str(value) for header, value in answer["headers"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordCorrupt(name, "the kept answer cannot be read") from error
