"""Between selecting and gathering: measure what is lost, and decide where a loss was asked for."""

from collections.abc import Generator

from kvkeep_service.auto_ratio import (
    AutoRatio,
    Found,
    Unmeasured,
    Unreachable,
    smallest_trusted,
    smallest_within,
)
from kvkeep_service.engine.fidelity import Meter


class LossUnreachable(RuntimeError):
    """Even the highest ratio loses more than was to be lost.

    In nats per token: ``loss`` is what counts, ``measured`` the same without the standard errors,
    ``margin`` of them, that count with it.
    """

    def __init__(
        self, max_loss: float, ratio: float, loss: float, measured: float, margin: float
    ) -> None:
        super().__init__(
            f"at ratio {ratio} {measured:.4g} nats per token were lost as measured, {loss:.4g} with"
            f" the {margin} standard errors that count; max_loss is {max_loss}"
        )
        self.ratio = ratio
        self.loss = loss
        self.measured = measured


def check(meter: Meter, auto: AutoRatio | None) -> Generator[None, None, float | None]:
    """Measure as many ratios as are affordable; return the one that ``auto`` asks for.

    Yields after each work item. Without ``auto`` the highest ratios are measured, and the
    result is None. Modifies the meter. Raises: LossUnreachable.
    """
    if auto is None:
        yield from meter.measure(meter.ratios[: meter.num_left])
        return None
    highest = auto.candidates[-1]
    while True:
        losses = meter.cautious_losses()
        within = [ratio for ratio, loss in losses.items() if loss <= auto.max_loss]
        match smallest_within(auto.candidates, losses, auto.max_loss):
            case Found(ratio):
                return ratio
            case Unreachable(ratio, loss):
                raise _unreachable(meter, auto.max_loss, ratio, loss)
            case Unmeasured(ratio):
                if meter.num_left == 0:
                    break
                # The last measurement is for the last resort, where nothing else will do yet.
                is_last = meter.num_left == 1 and not within and highest not in losses
                yield from meter.measure([highest if is_last else ratio])
    # What was not tried is trusted no further than its neighbours allow.
    trusted = smallest_trusted(auto.candidates, losses, auto.max_loss)
    if trusted is None and highest in losses:
        raise _unreachable(meter, auto.max_loss, highest, losses[highest])
    return highest if trusted is None else trusted


def _unreachable(meter: Meter, max_loss: float, ratio: float, loss: float) -> LossUnreachable:
    fidelity = meter.fidelity()
    measured = None if fidelity is None else fidelity.loss(ratio)
    measured = loss if measured is None else measured
    return LossUnreachable(max_loss, ratio, loss, measured, meter.margin)
