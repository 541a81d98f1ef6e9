"""What a model's heads are worth, measured once, and how that is written down.

A head's score is the highest that any of its rows gets from KVzip: arXiv 2505.23416, section 3,
and its code, which measures it on one long text. ``kvkeep-server calibrate`` writes the file.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class HeadScoresInvalid(ValueError):
    """The bytes are no head scores, or not of this model; the message says what is wrong."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: Literal["kvkeep-head-scores"] = "kvkeep-head-scores"
    schema_version: Literal[1] = 1
    weights_digest: Annotated[str, Field(min_length=1)]
    tokens: Annotated[int, Field(ge=1)]
    """How many were read to measure them."""
    scores: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...]
    """[evicting layers][kv heads]."""


@dataclass(frozen=True, slots=True)
class HeadScores:
    """One score per evicting layer and KV head, higher is kept; ``digest``: the file's sha256."""

    scores: tuple[tuple[float, ...], ...]
    digest: str

    @classmethod
    def parse(cls, content: bytes, *, weights_digest: str, num_layers: int, num_heads: int) -> Self:
        """Read a file of the model with these weights. Raises: HeadScoresInvalid."""
        try:
            read = _File.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise HeadScoresInvalid(f"{where}: {first['msg']}") from error
        if read.weights_digest != weights_digest:
            raise HeadScoresInvalid(f"they are of the weights {read.weights_digest!r}")
        if [len(layer) for layer in read.scores] != [num_heads] * num_layers:
            raise HeadScoresInvalid(f"{num_layers} layers of {num_heads} heads are needed")
        return cls(read.scores, hashlib.sha256(content).hexdigest())


def encode_head_scores(
    scores: tuple[tuple[float, ...], ...], *, weights_digest: str, tokens: int
) -> bytes:
    """Write scores [evicting layers][kv heads], measured on so many tokens, for ``parse``."""
    return (
        _File(weights_digest=weights_digest, tokens=tokens, scores=scores)
        .model_dump_json(indent=1)
        .encode()
    )
