"""An engine under test: forwards that are counted and can be held, and who listens to them."""

import threading
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvkeep_service.engine.answering import QueryTask
from kvkeep_service.engine.attention import AttentionPass
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import (
    Sequence,
    SequenceOptions,
    decode_step,
    prefill_question,
)
from kvkeep_service.engine.forward import LayeredForward
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import Scheduler, SchedulerStats
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts

from .models import VOCABULARY

# Nothing here takes long; whoever waits longer waits for something that will not come.
PATIENCE_SECONDS = 60
PROMPTS = RepeatPrompts(first=(1, 2, 3), later=(4, 5), turn_end=(6,))
RATIOS = (0.1, 0.3, 0.6)
IDLE = SchedulerStats(running=0, waiting=0, builds=0, is_alive=True)
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(
        WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
)


class GatedModel(LanguageModel):
    """A model that counts its forwards, and in which a test can stop any of them.

    ``batches`` holds the number of sequences of every forward that was begun, ``tokens`` the
    shape [batch, tokens] of what it read.
    """

    def __init__(self, inner: LanguageModel) -> None:
        super().__init__(inner._model, inner.shape)
        self.batches: list[int] = []
        self.tokens: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self._gate = threading.Condition()
        self._allowed: int | None = None
        self._is_held = False

    def hold_after(self, forwards: int) -> None:
        """Let so many more forwards begin, and keep the one after them waiting."""
        with self._gate:
            self._allowed = forwards
            self._gate.notify_all()

    def release(self) -> None:
        """Let all forwards pass."""
        with self._gate:
            self._allowed = None
            self._gate.notify_all()

    def wait_until_held(self) -> None:
        """Return once a forward waits here, and with it the whole engine."""
        with self._gate:
            came = self._gate.wait_for(
                lambda: self._is_held and self._allowed == 0, PATIENCE_SECONDS
            )
            assert came, "no forward came"

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        self._pass_the_gate(token_ids)
        return super().hidden(token_ids, positions, attention)

    def begin(self, token_ids: torch.Tensor, positions: torch.Tensor) -> LayeredForward:
        self._pass_the_gate(token_ids)
        return super().begin(token_ids, positions)

    def _pass_the_gate(self, token_ids: torch.Tensor) -> None:
        with self._gate:
            self._is_held = True
            self._gate.notify_all()
            passes = self._gate.wait_for(lambda: self._allowed != 0, PATIENCE_SECONDS)
            assert passes, "nobody opened the gate"
            self._is_held = False
            if self._allowed is not None:
                self._allowed -= 1
        self.batches.append(len(token_ids))
        self.tokens.append((len(token_ids), token_ids.shape[1]))
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class Listener:
    """Takes what the engine says of one query, and lets a test wait for its end."""

    pieces: list[str] = field(default_factory=list)
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    times_ended: int = 0

    def on_text(self, text: str) -> None:
        self.pieces.append(text)

    def on_finished(self, error: BaseException | None) -> None:
        self.error = error
        self.times_ended += 1
        self.ended.set()

    def wait(self) -> "Listener":
        assert self.ended.wait(PATIENCE_SECONDS), "the query did not end"
        return self


def policy(*, remainder: bool = False) -> KVzip:
    return KVzip(PROMPTS, scoring="local", chunk_tokens=128, remainder=remainder)


def sequence(
    model: LanguageModel, view: ContextView, question: list[int], options: SequenceOptions
) -> Sequence:
    return Sequence(model, view, question, options, tokenizer=WORDS, stop_ids=frozenset())


def submit(scheduler: Scheduler, asked: Sequence) -> tuple[QueryTask, Listener]:
    listener = Listener()
    task = QueryTask(asked, listener)
    scheduler.submit_query(task)
    return task, listener


def answer_alone(model: LanguageModel, asked: Sequence) -> list[int]:
    """Run one sequence to its end, with nothing else in the engine."""
    while not asked.is_prefilled:
        prefill_question(model, asked)
    while asked.finish_reason is None:
        (outcome,) = decode_step(model, [asked])
        assert isinstance(outcome, str)
    return asked.generated
