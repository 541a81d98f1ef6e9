"""What is asked together: read as tokens, run as sequences, and kept to be continued."""

import asyncio
from collections.abc import Sequence as Several

from kvkeep_service.engine.conversation import with_system
from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.engine.sampling import SamplingOptions
from kvkeep_service.errors import QuestionTooLong, SessionGone
from kvkeep_service.ports import QueryRequest, Turn
from kvkeep_service.residency import Pinned
from kvkeep_service.running import RunningQuery
from kvkeep_service.sessions import AnswerName, Conversation, Sessions


class Asking:
    """Requests on one context that are answered together, perhaps from an earlier answer on."""

    def __init__(
        self, loaded: LoadedModel, sessions: Sessions, requests: Several[QueryRequest]
    ) -> None:
        """Look up the answer that is continued.

        Raises: SessionGone.
        """
        self._loaded = loaded
        self._sessions = sessions
        self._requests = requests
        self._request = requests[0]
        self._earlier: Conversation | None = None
        if self._request.session is not None:
            self._earlier = sessions.find(self._session, self._request.cache_id)
        self._turns: list[tuple[Turn, ...]] = []
        self._ids: list[list[int]] = []

    @property
    def ratio(self) -> float:
        """The ratio to read at: of earlier turns, if there are any."""
        return self._request.ratio if self._earlier is None else self._earlier.ratio

    @property
    def min_ratio(self) -> float | None:
        """The least that will do; a conversation goes on at its ratio and no other."""
        return self._request.min_ratio if self._earlier is None else None

    async def read(self) -> None:
        """Tokenise all that is asked. Modifies: this object.

        Raises: QuestionTooLong, TemplateChangesPrefix, InvalidRequest.
        """
        await asyncio.to_thread(self._read)

    async def sequences(self, pinned: Pinned) -> list[Sequence]:
        """What the engine is to run, over the rows of ``pinned``; copies the tail it goes on from.

        Raises: QuestionTooLong, when no position is left for an answer; SessionGone, when these
            are other rows than those of earlier turns.
        """
        if self._earlier is not None and self._earlier.generation != pinned.context.generation:
            raise self._sessions.replaced(self._session)
        left = self._loaded.language_model.shape.max_positions - pinned.context.num_tokens
        for index, ids in enumerate(self._ids):
            if len(ids) >= left:
                raise QuestionTooLong(len(ids), left - 1, self._number(index))
        return await asyncio.to_thread(
            lambda: [
                self._sequence(pinned, request, ids, left - len(ids))
                for request, ids in zip(self._requests, self._ids, strict=True)
            ]
        )

    def gone(self) -> SessionGone | None:
        """What to tell when the rows of earlier turns are there no more; None for a first turn."""
        return None if self._earlier is None else self._sessions.replaced(self._session)

    async def keep(self, query: RunningQuery, pinned: Pinned) -> None:
        """Keep what continues an answer that is finished. Modifies: the sessions."""
        request, sequence = self._requests[query.index], query.sequence
        name = request.answer_id
        if name is None or not self._sessions.is_on:
            return
        tail = await asyncio.to_thread(sequence.tail.copied, sequence.tail.tokens)
        conversation = Conversation(
            cache_id=request.cache_id,
            generation=pinned.context.generation,
            ratio=sequence.context.ratio,
            turns=(*self._turns[query.index], Turn("assistant", query.text)),
            ids=(*sequence.question_ids, *sequence.generated)[: tail.tokens],
            tail=tail,
            replaces=None if request.session is None or request.fork else self._session,
        )
        # Who continues an answer has got it, and will not ask again for what it replaced.
        if self._earlier is not None and self._earlier.replaces is not None:
            self._sessions.drop(self._earlier.replaces, "continued")
        kept_as = AnswerName(request.tenant, request.context_id, name)
        self._sessions.keep(kept_as, conversation)

    def _read(self) -> None:
        earlier = () if self._earlier is None else self._earlier.turns
        for index, request in enumerate(self._requests):
            said = (*request.history, Turn("user", request.question))
            turns = (*earlier, *with_system(said, request.system))
            self._check_length(turns, self._number(index))
            self._turns.append(turns)
            arguments = request.chat_template_kwargs
            self._ids.append(self._loaded.template.asked_ids(turns, arguments))

    @property
    def _session(self) -> AnswerName:
        request = self._request
        assert request.session is not None
        return AnswerName(request.tenant, request.context_id, request.session)

    def _number(self, index: int) -> int | None:
        """What to call a question; a lone one has no number."""
        return index if len(self._requests) > 1 else None

    def _check_length(self, turns: Several[Turn], question: int | None) -> None:
        """Refuse what cannot fit before it is tokenised. Raises: QuestionTooLong."""
        fewest = sum(self._loaded.template.fewest_tokens(turn.text) for turn in turns)
        most = self._loaded.info.max_positions
        if fewest > most:
            raise QuestionTooLong(fewest, most, question)

    def _sequence(
        self, pinned: Pinned, request: QueryRequest, ids: list[int], left: int
    ) -> Sequence:
        earlier = self._earlier
        sampling = SamplingOptions(request.temperature, request.top_p, request.top_k, request.seed)
        options = SequenceOptions(
            min(request.max_tokens, left), sampling, request.stop, request.top_logprobs
        )
        return Sequence(
            self._loaded.language_model,
            pinned.context.view(pinned.ratio),
            ids,
            options,
            tokenizer=self._loaded.tokenizer,
            stop_ids=self._loaded.stop_ids,
            tail=None if earlier is None else earlier.tail.copied(earlier.shared(ids)),
        )
