"""How much is kept: the limits of a ratio, and the ratio that an absolute budget comes to.

Both are of what may be evicted: rows of the prefix and of protected spans stay besides.
"""

from math import ceil
from typing import Final

from kvkeep_service.errors import InvalidRequest

DEFAULT_RATIO: Final = 0.3
HEAD_RATIO: Final = 0.6
"""Default of whole heads: arXiv 2505.23416 recommends it where no scoring pass is made."""
LOSSY_BELOW: Final = 0.15
RATIO_MIN: Final = 0.05


def check_ratio(field: str, ratio: float, *, allow_lossy: bool) -> None:
    """Refuse a ratio outside the contract. Raises: InvalidRequest, naming the limit."""
    if not RATIO_MIN <= ratio <= 1.0:
        raise InvalidRequest(field, f"{ratio} is outside {RATIO_MIN} to 1.0")
    if ratio < LOSSY_BELOW and not allow_lossy:
        raise InvalidRequest(field, f"{ratio} is below {LOSSY_BELOW}: send allow_lossy too")


def ratio_of_tokens(tokens: int, num_eligible: int, *, allow_lossy: bool) -> float:
    """The ratio that keeps ``tokens`` rows per head on average, of ``num_eligible`` each.

    A budget of at least all of them keeps everything: 1.0. The count kept is exactly ``tokens``
    times the number of heads, since a ratio's count is rounded.
    Raises: InvalidRequest, naming the fewest tokens of this document that are allowed.
    """
    if tokens >= num_eligible:
        return 1.0
    ratio = tokens / num_eligible
    limit = RATIO_MIN if allow_lossy else LOSSY_BELOW
    if ratio < limit:
        fewest = ceil(limit * num_eligible)
        advice = "" if allow_lossy else ", or send allow_lossy too"
        raise InvalidRequest(
            "compression.tokens",
            f"{tokens} of {num_eligible} tokens is a ratio below {limit}:"
            f" send at least {fewest}{advice}",
        )
    return ratio
