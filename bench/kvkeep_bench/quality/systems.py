"""What is compared: the full cache, ours under several policies, and kvpress."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvkeep_service.ports import CompressionSpec, PolicyName

RATIOS = (0.5, 0.3, 0.2, 0.1)
"""Fractions kept, as in the published tables."""
FULL = "full"
EXACT = "kvzip exact"
LOCAL = "kvzip local"
NO_REMAINDER = ", no remainder"
"""Evicted rows are gone, as published."""
KVPRESS = "kvpress KVzip"
BASELINES: tuple[PolicyName, ...] = ("expected_attention", "snapkv", "streaming", "random")
"""Policies that KVzip is compared with. Whole heads need a calibration of the model."""


PLAIN = CompressionSpec(policy="none", ratio=1.0)
"""Everything kept."""


@dataclass(frozen=True, slots=True)
class System:
    """One way to keep a document. ``compression`` None: kvpress, in a process of its own."""

    name: str
    compression: CompressionSpec | None
    ratios: tuple[float, ...]


def _ours(name: str, compression: CompressionSpec) -> System:
    return System(name, compression, RATIOS)


def _all() -> Mapping[str, System]:
    systems = (
        System(FULL, PLAIN, (1.0,)),
        _ours(EXACT, CompressionSpec(scoring="exact")),
        _ours(LOCAL, CompressionSpec(scoring="local")),
        _ours(EXACT + NO_REMAINDER, CompressionSpec(scoring="exact", remainder=False)),
        _ours(LOCAL + NO_REMAINDER, CompressionSpec(scoring="local", remainder=False)),
        _ours("kvzip+ local", CompressionSpec(scoring="local", normalization="kvzip_plus")),
        _ours("kvzip local, int8", CompressionSpec(scoring="local", quantization="int8")),
        _ours("kvzip local, int4", CompressionSpec(scoring="local", quantization="int4")),
        *(_ours(name, CompressionSpec(policy=name)) for name in BASELINES),
        System(KVPRESS, None, RATIOS),
    )
    return {system.name: system for system in systems}


SYSTEMS = _all()
