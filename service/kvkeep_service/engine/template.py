"""Rendering and tokenising: where the document stands in the prompt, and as which tokens.

The model's own chat template is rendered once with sentinels for document and question and cut
there. What the model sees is the concatenation of three pieces, tokenised separately: prefix
(chat header, system text, instructions), document, suffix (question, end of turn, assistant
header). The document is tokenised before any question is known, so token ids may differ from
those of a rendering in one go; the rendered *text* may not, and that is checked.

User text never yields control tokens. The set is the one of transformers'
``apply_chat_template(sanitize_control_tokens=True)``, because ``split_special_tokens=True``
leaves added tokens such as ``<tool_call>`` alive in ordinary pieces.
"""

import hashlib
import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kvkeep_service.engine.conversation import SEPARATOR, marked_text, unrendered
from kvkeep_service.engine.marks import ControlTokens, hole, parts
from kvkeep_service.errors import InvalidRequest, TemplateChangesPrefix
from kvkeep_service.ports import Turn
from kvkeep_service.start_errors import ModelUnsupported

_DOCUMENT, _QUESTION = hole("document"), hole("question")
_ANY_SYSTEM = "Some system text."


class Piece(NamedTuple):
    """Token ids with the character range of the source text that each covers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Frame:
    """The prompt around document and question, as text with user control tokens marked."""

    prefix: str
    suffix: str


class ChatTemplate:
    """One model's chat template and tokenizer. Stateless after construction; thread-safe reads.

    Raises: ModelUnsupported, when there is no template, no fast tokenizer, or the template
        does not keep document and question verbatim and in order.
    """

    def __init__(self, tokenizer: Any, *, model: str) -> None:
        """Check the template on a probe text before anything is served with it."""
        if not tokenizer.is_fast:
            raise ModelUnsupported(model, "its tokenizer is not a fast one (no character offsets)")
        if not tokenizer.chat_template or not isinstance(tokenizer.chat_template, str):
            raise ModelUnsupported(model, "it has no chat template; give one with --chat-template")
        self._tokenizer = tokenizer
        self._model = model
        # The set has no public accessor in transformers 5.24.
        control = tokenizer._get_control_tokens(tokenizer.chat_template)
        self._control = ControlTokens(control)
        self._control_ids = frozenset(tokenizer.convert_tokens_to_ids(list(control)))
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._newline_ids = tokenizer.encode("\n", add_special_tokens=False)
        # A template keyword may not be one of the renderer's own, such as another template.
        self._reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self._takes_system = False
        # Tokenising sets state on the shared backend, and is called from several threads.
        self._lock = threading.Lock()
        self._probe()

    @property
    def digest(self) -> str:
        """Identity of everything that turns text into ids: tokenizer and template."""
        backend = self._tokenizer.backend_tokenizer
        return hashlib.sha256(
            f"{backend.to_str()}\0{self._tokenizer.chat_template}".encode()
        ).hexdigest()

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the tokens of a text, without tokenising it.

        Tokenising takes seconds for megabytes, and a text far over the limit needs no count.
        """
        return max(self._control.count(text), len(text) // self._longest_token)

    def frame(
        self,
        system: str | None = None,
        instructions: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> Frame:
        """Render with sentinels and cut. ``arguments`` are chat template keywords.

        Raises: InvalidRequest, when the template fails or loses a sentinel.
        """
        before = f"{self._control.marked(instructions)}{SEPARATOR}" if instructions else ""
        rendered = self._render(system, f"{before}{_DOCUMENT}{_QUESTION}", arguments)
        prefix, found, rest = rendered.partition(_DOCUMENT)
        between, asked, suffix = rest.partition(_QUESTION)
        if not found or not asked or between or _DOCUMENT in suffix or _QUESTION in suffix:
            raise InvalidRequest(
                "chat_template_kwargs" if arguments else "system",
                "the chat template does not keep document and question verbatim",
            )
        return Frame(prefix, suffix)

    def prefix_ids(self, prefix: str) -> list[int]:
        """Token ids of a frame's prefix, control tokens of the template alive."""
        return self._encode(prefix, at_start=True).ids

    def document_piece(self, text: str) -> Piece:
        """Tokenise a document as plain text, with the characters that each token covers."""
        return self._encode(self._control.marked(text), at_start=False)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a plain text that follows other text, without control tokens."""
        return self._encode(self._control.marked(text), at_start=False).ids

    def token_text(self, token_id: int) -> str:
        """One token by itself, for people: a part of a character shows as U+FFFD."""
        return str(self._tokenizer.decode([token_id]))

    def turn_end_ids(self) -> list[int]:
        """End of the user's turn and the assistant's header, as the template writes them."""
        return self._encode(self.frame().suffix, at_start=False).ids

    def asked_ids(self, turns: Sequence[Turn], arguments: Mapping[str, object]) -> list[int]:
        """Token ids of all that follows the document: turns, and the header of an answer.

        The first turn ends the message of the user that the document begins; the last is the
        user's too. The text is that of a rendering of the whole conversation in one go.
        Raises: TemplateChangesPrefix, when ``arguments`` would change what the document was
            read under; InvalidRequest, when the template does not let these turns follow it.
        """
        if arguments and self.frame(arguments=arguments).prefix != self.frame().prefix:
            raise TemplateChangesPrefix(", ".join(sorted(arguments)))
        text = marked_text(partial(self._following, arguments), self._control, turns)
        return self._encode(text, at_start=False).ids

    def _following(self, arguments: Mapping[str, object], turns: Sequence[Turn]) -> str:
        """Render turns behind a document. Raises: InvalidRequest, as ``asked_ids``."""
        after = self._around_document(None, arguments, turns)
        # The document may have been read under a system text, which some templates write
        # elsewhere as a conversation goes on: its prefix would not be the stored one.
        if (
            len(turns) > 1
            and self._takes_system
            and self._around_document(_ANY_SYSTEM, arguments, turns) != after
        ):
            raise unrendered(turns)
        return after

    def _around_document(
        self, system: str | None, arguments: Mapping[str, object], turns: Sequence[Turn]
    ) -> str:
        """What follows the document in a rendering, whose prefix must be that of a document."""
        begun = f"{_DOCUMENT}{SEPARATOR}{turns[0].text}"
        rendered = self._render(system, begun, arguments, turns[1:])
        prefix, found, after = rendered.partition(_DOCUMENT)
        if not found or _DOCUMENT in after or prefix != self.frame(system, None, arguments).prefix:
            raise unrendered(turns)
        return after

    def _render(
        self,
        system: str | None,
        content: str,
        arguments: Mapping[str, object] | None,
        later: Sequence[Turn] = (),
    ) -> str:
        for name in arguments or {}:
            if name in self._reserved:
                raise InvalidRequest(f"chat_template_kwargs.{name}", "is not a template keyword")
        messages = [{"role": "user", "content": content}]
        messages += [{"role": turn.role, "content": turn.text} for turn in later]
        if system:
            messages.insert(0, {"role": "system", "content": self._control.marked(system)})
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(arguments or {})
            )
        # A template is a program: it may raise anything, and what it raises is about its input.
        except Exception as error:
            field = "messages" if later else "chat_template_kwargs" if arguments else "system"
            raise InvalidRequest(field, f"the chat template refuses it: {error}") from error
        return str(rendered)

    def _probe(self) -> None:
        """Prefix + document + suffix must equal a full rendering, as text."""
        document, question = "A line.\n\nAnother line.", "Which line?"
        try:
            frame = self.frame()
        except InvalidRequest as error:
            raise ModelUnsupported(self._model, error.reason) from error
        whole = self._render(None, f"{document}{SEPARATOR}{question}", None)
        if whole != f"{frame.prefix}{document}{SEPARATOR}{question}{frame.suffix}":
            raise ModelUnsupported(self._model, "its chat template changes the text it is given")
        with suppress(InvalidRequest):
            self._takes_system = _ANY_SYSTEM in self.frame(_ANY_SYSTEM).prefix

    def _encode(self, marked: str, *, at_start: bool) -> Piece:
        """Encode marked text; offsets count characters of the text without the marks."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        consumed = 0
        for index, part in enumerate(parts(marked)):
            if not part:
                continue
            as_text = index % 2 == 1
            first = at_start and not ids
            piece = self._encode_part(part, as_text=as_text, at_start=first)
            if as_text and not self._control_ids.isdisjoint(piece.ids):
                raise InvalidRequest("document", f"{part!r} cannot be read as plain text")
            ids += piece.ids
            offsets += [(begin + consumed, end + consumed) for begin, end in piece.offsets]
            consumed += len(part)
        return Piece(ids, offsets)

    def _encode_part(self, part: str, *, as_text: bool, at_start: bool) -> Piece:
        """Encode after a newline that is then removed: SentencePiece would add a space."""
        lead = len(self._newline_ids)
        if not at_start:
            piece = self._encode_plain(f"\n{part}", as_text=as_text)
            if piece.ids[:lead] == self._newline_ids:
                shifted = [(max(0, begin - 1), end - 1) for begin, end in piece.offsets[lead:]]
                return Piece(piece.ids[lead:], shifted)
        return self._encode_plain(part, as_text=as_text)

    def _encode_plain(self, text: str, *, as_text: bool) -> Piece:
        with self._lock:
            encoded = self._tokenizer(
                text,
                add_special_tokens=False,
                return_offsets_mapping=True,
                split_special_tokens=as_text,
            )
        return Piece(list(encoded["input_ids"]), [tuple(o) for o in encoded["offset_mapping"]])
