"""The text that follows a document: turns as the chat template writes them, with marks.

It is the text of a rendering in one go, character for character, once the marks are taken out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvkeep_service.engine.marks import ControlTokens, cleared, hole, unmarked
from kvkeep_service.errors import InvalidRequest
from kvkeep_service.ports import Turn

SEPARATOR = "\n\n"


def with_system(turns: Sequence[Turn], system: str | None) -> tuple[Turn, ...]:
    """The turns with extra system text before the first of them."""
    if not system:
        return tuple(turns)
    return (replace(turns[0], text=f"{system}{SEPARATOR}{turns[0].text}"), *turns[1:])


def marked_text(
    render: Callable[[Sequence[Turn]], str], control: ControlTokens, turns: Sequence[Turn]
) -> str:
    """What ``render`` makes of the turns, with their control tokens marked.

    Raises: InvalidRequest, when the template changes what stands around a turn with its text.
    """
    plain = [replace(turn, text=cleared(turn.text)) for turn in turns]
    whole = render(plain)
    with_marks = [replace(turn, text=control.marked(turn.text)) for turn in turns]
    if with_marks == plain:
        return whole
    marked = render(with_marks)
    if unmarked(marked) != whole:
        # Templates take thoughts out of earlier answers, for one, and marks were in the way.
        marked = _turn_by_turn(render, control, plain)
    if unmarked(marked) != whole:
        raise unrendered(turns)
    return marked


def unrendered(turns: Sequence[Turn]) -> InvalidRequest:
    """The template does not let these turns follow a document."""
    field = "messages" if len(turns) > 1 else "question"
    return InvalidRequest(field, "the chat template cannot let these turns follow the document")


def _turn_by_turn(
    render: Callable[[Sequence[Turn]], str], control: ControlTokens, turns: Sequence[Turn]
) -> str:
    """Find what the template writes of each turn, and mark that."""
    holes = [replace(turn, text=hole(f"turn {index}")) for index, turn in enumerate(turns)]
    text, before, rest = "", "", render(holes)
    for index, turn in enumerate(turns):
        seam, found, after = rest.partition(holes[index].text)
        before += seam
        alone = render([*holes[:index], turn, *holes[index + 1 :]])
        written = alone.removeprefix(before).removesuffix(after)
        if not found or alone != f"{before}{written}{after}":
            raise unrendered(turns)
        text += seam + control.marked(written)
        before, rest = before + found, after
    return text + rest
