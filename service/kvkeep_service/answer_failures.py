"""What an answer fails with when computing it fails, whatever that was.

No message is taken over from a library: it may quote what it choked on. The log says where it was.
"""

from kvkeep_service.errors import ServiceError


class AnswerFailed(ServiceError):
    """Computing the answer failed, for a reason that is no fault of the question."""

    code = "answer_failed"

    def __init__(self, error: Exception) -> None:
        """Name the kind of error."""
        kind = type(error).__name__
        super().__init__(f"computing the answer failed with {kind}", error=kind)


class LogitsNotFinite(ServiceError):
    """The model gave infinite logits, or none that are numbers: no token follows from them."""

    code = "logits_not_finite"

    def __init__(self, dtype: str) -> None:
        """Name the dtype that the model runs in, of which too narrow a one is the usual reason."""
        super().__init__(
            f"the model gave logits that are not finite, in {dtype}: have the server run it with"
            " another KVKEEP_DTYPE, or at a higher ratio if only this context is concerned",
            dtype=dtype,
        )
