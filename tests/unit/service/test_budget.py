"""An absolute budget becomes the ratio that keeps exactly so many rows per head."""

import pytest

from kvkeep_kernels.compaction import kept_count
from kvkeep_service.budget import ratio_of_tokens
from kvkeep_service.errors import InvalidRequest


@pytest.mark.parametrize("num_eligible", [257, 1000, 4099, 48_211, 480_001])
def test_the_count_kept_is_exact(num_eligible: int) -> None:
    first = num_eligible * 3 // 20 + 1
    for tokens in {first, first + 1, num_eligible // 3, num_eligible - 1}:
        ratio = ratio_of_tokens(tokens, num_eligible, allow_lossy=False)
        for heads in (6, 90, 256):
            assert kept_count(ratio, heads, num_eligible) == heads * tokens


@pytest.mark.parametrize("tokens", [300, 301, 2**31 - 1])
def test_a_budget_that_the_document_does_not_fill_keeps_everything(tokens: int) -> None:
    assert ratio_of_tokens(tokens, 300, allow_lossy=False) == 1.0


@pytest.mark.parametrize(("allow_lossy", "fewest"), [(False, 150), (True, 50)])
def test_too_small_a_budget_is_refused_with_the_fewest_tokens(
    allow_lossy: bool, fewest: int
) -> None:
    assert ratio_of_tokens(fewest, 1000, allow_lossy=allow_lossy) == fewest / 1000
    with pytest.raises(InvalidRequest, match=f"at least {fewest}") as refused:
        ratio_of_tokens(fewest - 1, 1000, allow_lossy=allow_lossy)
    assert refused.value.field == "compression.tokens"
    assert ("allow_lossy" in refused.value.reason) is not allow_lossy
