"""The ratio of a context that asks for a loss, where an earlier build has measured enough."""

from collections.abc import Sequence

from kvkeep_service.auto_ratio import cautious_losses, searched
from kvkeep_storage.records import CacheRecord, ContextRecord


def ratio_by(
    committed: CacheRecord | None, record: ContextRecord, candidates: Sequence[float]
) -> float | None:
    """The ratio of a context, by what was measured of its cache; None when that is not enough.

    It is one that the cache is cut at.
    """
    if committed is None or record.max_loss is None:
        return None
    losses = cautious_losses(
        committed.fidelity, is_exact=record.quantization == "none", remainder=record.remainder
    )
    found = searched(candidates, losses, record.max_loss)
    return found if found in committed.ratios else None
