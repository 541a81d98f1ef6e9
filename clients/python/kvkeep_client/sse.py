"""Server-sent events: bytes in, events out.

The client's own, for two reasons. Lines end only at CR, LF or CRLF, while ``str.splitlines``
would cut an answer at U+2028. And comments are seen: they are the server's sign of life, so a
caller's deadline can be kept while nothing happens.
"""

import codecs
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep_client.errors import UnexpectedResponse
from kvkeep_client.fields import Fields


@dataclass(frozen=True, slots=True)
class Event:
    """One event with the JSON object it carries."""

    name: str
    data: Fields


class EventDecoder:
    """Takes the chunks of one response in order; keeps what is not yet whole."""

    def __init__(self) -> None:
        self._text = io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder("utf-8")(), translate=True
        )
        self._rest = ""
        self._name = "message"
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that ``chunk`` completes.

        Raises: UnexpectedResponse, for bytes that are not UTF-8 or data that is no JSON object.
        """
        try:
            text = self._rest + self._text.decode(chunk)
        except UnicodeDecodeError as error:
            raise UnexpectedResponse("the event stream is not UTF-8") from error
        *lines, self._rest = text.split("\n")
        for line in lines:
            if not line:
                yield from self._finish()
            else:
                self._take(line)

    def _take(self, line: str) -> None:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)

    def _finish(self) -> Iterator[Event]:
        name, data = self._name, self._data
        self._name, self._data = "message", []
        if not data:
            return
        try:
            value = json.loads("\n".join(data))
        except json.JSONDecodeError as error:
            raise UnexpectedResponse(f"event {name!r} carries no JSON") from error
        yield Event(name, Fields.of(value, f"event {name!r}"))
