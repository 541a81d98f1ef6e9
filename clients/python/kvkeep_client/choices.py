"""What options of the command line may be chosen from."""

from enum import StrEnum


class Policy(StrEnum):
    """What picks the part that stays."""

    KVZIP = "kvzip"
    KVZIP_HEAD = "kvzip_head"
    SNAPKV = "snapkv"
    EXPECTED_ATTENTION = "expected_attention"
    STREAMING = "streaming"
    RANDOM = "random"
    NONE = "none"


class Scoring(StrEnum):
    """How KVzip scores what to keep."""

    AUTO = "auto"
    EXACT = "exact"
    LOCAL = "local"


class Normalization(StrEnum):
    """What scores are multiplied by."""

    NONE = "none"
    KVZIP_PLUS = "kvzip_plus"


class Quantization(StrEnum):
    """What numbers that are kept become."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
