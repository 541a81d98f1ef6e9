"""Who gets remainders: KVzip unless it is asked not to, on models whose layers all evict."""

import pytest

from kvkeep_service.policies.choose import PolicyChoice
from kvkeep_service.ports import CompressionSpec

from ..engine.gated import PROMPTS
from ..engine.models import engine_model, random_document, run_build, stock_model

DOCUMENT = random_document(300)


@pytest.mark.parametrize(
    ("kind", "compression", "expected"),
    [
        ("llama", CompressionSpec(), True),
        ("llama", CompressionSpec(scoring="exact"), True),
        ("llama", CompressionSpec(normalization="kvzip_plus"), True),
        ("llama", CompressionSpec(remainder=False), False),
        ("llama", CompressionSpec(policy="snapkv"), False),
        ("llama", CompressionSpec(policy="random"), False),
        ("gemma3", CompressionSpec(), False),
        ("ministral", CompressionSpec(), False),
    ],
)
def test_who_gets_remainders_and_says_so_in_its_identity(
    kind: str, compression: CompressionSpec, expected: bool
) -> None:
    model = engine_model(stock_model(kind))
    policy = PolicyChoice(model, PROMPTS, None).choose(compression, DOCUMENT)
    assert policy is not None
    assert ("remainder" in policy.parameters) == expected
    built = run_build(model, DOCUMENT, policy, (0.3,))
    assert (built.context.remainders is not None) == expected
    assert built.context.view(0.3).num_lead == (policy.parameters["remainder"] if expected else 0)
