"""What is typed to the commands, answers on standard output, and how a command is called."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

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


def write_line(text: str) -> None:
    """Write a line of the result, which whoever reads our output sees at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_json(value: object) -> None:
    """Write the result as JSON."""
    write_line(json.dumps(value, ensure_ascii=False, indent=2))


def say(text: str) -> None:
    """Say something about the way to the result."""
    sys.stderr.write(f"{text}\n")


def called(command: str) -> str:
    """How to call a command of kvkeep's here: by its name, unless only its path would do."""
    beside = Path(sys.argv[0]).with_name(command)
    if shutil.which(command) or not beside.is_file():
        return command
    path = os.path.relpath(beside)
    return str(beside) if path.startswith("..") else path
