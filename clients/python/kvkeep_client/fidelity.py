"""What compression lost, as the server measured it."""

from dataclasses import dataclass

from kvkeep_client.fields import Fields


@dataclass(frozen=True, slots=True)
class RatioFidelity:
    """What reading a cache at one ratio loses; see ``Fidelity``.

    ``loss_error`` is the standard error of ``nll_kept`` less ``nll_full``.
    """

    ratio: float
    nll_kept: float
    top1_agreement: float
    loss_error: float


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What compression lost, measured on ``tokens`` tokens of the document in ``spans`` pieces.

    ``nll_full`` and ``nll_kept`` are mean losses in nats per token, with the whole cache and with
    what the context keeps; ``top1_agreement`` is how often both think the same token most likely.
    Both of the context are None where its own ratio was not among those measured.
    """

    spans: int
    tokens: int
    nll_full: float
    nll_kept: float | None
    top1_agreement: float | None
    ratios: tuple[RatioFidelity, ...]

    @property
    def loss(self) -> float | None:
        """What was lost, in nats per token; below zero by chance where it is little."""
        return None if self.nll_kept is None else self.nll_kept - self.nll_full


def read_fidelity(fields: Fields | None) -> Fidelity | None:
    """Read what was measured, if anything was. Raises: UnexpectedResponse, naming the field."""
    if fields is None:
        return None
    return Fidelity(
        spans=fields.integer("spans"),
        tokens=fields.integer("tokens"),
        nll_full=fields.number("nll_full"),
        nll_kept=fields.number_or_none("nll_kept"),
        top1_agreement=fields.number_or_none("top1_agreement"),
        ratios=tuple(
            RatioFidelity(
                ratio=item.number("ratio"),
                nll_kept=item.number("nll_kept"),
                top1_agreement=item.number("top1_agreement"),
                loss_error=item.number("loss_error"),
            )
            for item in fields.inners("ratios")
        ),
    )
