"""Requests that are refused at the door: what only the HTTP side can tell is wrong with them."""

from kvkeep_service.errors import Invalid, ServiceError


class BodyTooLarge(Invalid):
    """The request body passes the byte limit; it was not read to its end."""

    code = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        """Name the limit in bytes."""
        super().__init__(
            f"the request body is larger than {limit_bytes} bytes", limit_bytes=limit_bytes
        )
        self.limit_bytes = limit_bytes


class UnsupportedMediaType(Invalid):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"

    def __init__(self, media_type: str) -> None:
        """Name the media type that was sent; empty when none was."""
        super().__init__(f"send application/json, not {media_type or 'a body without a type'!r}")


class Unauthenticated(ServiceError):
    """No key, or one that is not known."""

    code = "unauthenticated"

    def __init__(self) -> None:
        """Say nothing about what was sent."""
        super().__init__("send a valid key as 'Authorization: Bearer KEY'")


class Forbidden(ServiceError):
    """This may not be asked in this way, whoever asks."""

    code = "forbidden"
