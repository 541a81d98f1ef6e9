"""What is typed to the commands, and answers as they appear on standard output."""

import sys
from collections.abc import Iterator

from kvkeep_client.answers import AnswerStream
from kvkeep_client.errors import KVKeepError


def typed_lines() -> Iterator[str]:
    """Lines of standard input that are not blank; asked for, where somebody is to type them."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def write_answer(stream: AnswerStream) -> None:
    """Write an answer piece by piece, and end its line. Raises: as the stream does."""
    is_begun = False
    try:
        for text in stream:
            sys.stdout.write(text)
            sys.stdout.flush()
            is_begun = True
    except KVKeepError:
        if is_begun:
            # On a terminal the error would stand in the line of the half answer.
            sys.stdout.write("\n")
            sys.stdout.flush()
        raise
    sys.stdout.write("\n")
