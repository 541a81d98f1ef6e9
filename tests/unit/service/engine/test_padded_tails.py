"""Tails side by side: the same attention as tail by tail, and the same tails afterwards."""

import itertools

import pytest
import torch

from kvkeep_kernels.attention import ragged_decode_batch
from kvkeep_kernels.layout import DecodeBatch, DecodeGroup, DenseKV, RaggedKV, ShapeError
from kvkeep_kernels.padded_tails import PaddedTails, Readers, decode_padded
from kvkeep_service.engine.answering import Answering, QueryTask
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import Tail
from kvkeep_service.engine.decode import Sequence, SequenceOptions, decode_step, prefill_question
from kvkeep_service.engine.graphs import GraphOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.tail_batch import TailBatch, is_worthwhile, place_rows

from .gated import Listener, answer_alone, sequence


def context(lengths: list[int], generator: torch.Generator) -> RaggedKV:
    k, v = torch.randn(2, max(1, sum(lengths)), 16, generator=generator)
    length = torch.tensor(lengths, dtype=torch.int32)
    start = (length.cumsum(0) - length).to(torch.int32)
    return RaggedKV(k, v, start, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_tails_are_attended_as_each_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 5, 64, 33, 2)
    # One context has a head without rows, another is long enough to be cut in segments.
    rows = [context([40, 0], generator), context([1500, 700], generator)]
    rows = [RaggedKV(one.k.to(dtype), one.v.to(dtype), one.start, one.length) for one in rows]
    members = (torch.tensor([3, 0]), torch.tensor([1, 2, 4]))
    q = torch.randn(5, 6, 16, generator=generator).to(dtype)
    kv = torch.randn(2, 5, 2, 64, 16, generator=generator).to(dtype)
    mask = torch.zeros(5, 1, 1, 64, dtype=dtype)
    for place, length in enumerate(lengths):
        mask[place, ..., length:] = -torch.inf
    out = decode_padded(
        q,
        [Readers(one, places) for one, places in zip(rows, members, strict=True)],
        PaddedTails(kv[0], kv[1], mask),
        scale=0.25,
    )
    groups = [
        DecodeGroup(
            one, tuple(DenseKV(*kv[:, place, :, : lengths[place]]) for place in places.tolist())
        )
        for one, places in zip(rows, members, strict=True)
    ]
    order = torch.cat(members)
    expected = torch.empty_like(out)
    expected[order] = ragged_decode_batch(q[order], DecodeBatch(tuple(groups)), scale=0.25)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()


def test_tails_that_do_not_fit_their_queries_are_refused_by_name() -> None:
    kv = torch.zeros(2, 3, 2, 8, 16)
    with pytest.raises(ShapeError, match=r"tails\.mask"):
        PaddedTails(kv[0], kv[1], torch.zeros(3, 1, 1, 9))
    with pytest.raises(ShapeError, match=r"tails\.v"):
        PaddedTails(kv[0], kv[1, :2], torch.zeros(3, 1, 1, 8))
    tails = PaddedTails(kv[0], kv[1], torch.zeros(3, 1, 1, 8))
    with pytest.raises(ShapeError, match=r"tails\.k"):
        decode_padded(torch.zeros(4, 6, 16), [], tails, scale=1.0)


def test_a_batch_that_changes_at_every_step_leaves_every_tail_as_it_would_be_alone(
    plain: LanguageModel, contexts: list[BuiltCache]
) -> None:
    views = [built.context.view(0.3) for built in contexts]

    def asked() -> list[Sequence]:
        return [
            sequence(plain, views[n % 3], list(range(1, 2 + 9 * n)), SequenceOptions(20))
            for n in range(7)
        ]

    alone = asked()
    for one in alone:
        answer_alone(plain, one)
    together = TailBatch(plain.shape, dtype=plain.dtype)
    all_of_them = asked()
    for one in all_of_them:
        prefill_question(plain, one)
    step, padded = 0, 0
    while running := [one for one in all_of_them if one.finish_reason is None]:
        # Somebody pauses at every step, and comes back with what was written without it.
        batch = [one for n, one in enumerate(running) if len(running) < 3 or n != step % 4]
        padded += is_worthwhile([one.tail for one in batch], 10_000)
        for outcome in decode_step(plain, batch, together):
            assert isinstance(outcome, str)
        step += 1
    assert padded > step / 2
    for one, other in zip(all_of_them, alone, strict=True):
        assert one.generated == other.generated
        assert one.tail.tokens == other.tail.tokens
        assert torch.allclose(one.tail.rows(0), other.tail.rows(0), atol=1e-4)


def test_a_step_that_fails_half_way_leaves_tails_as_they_were(
    plain: LanguageModel, contexts: list[BuiltCache]
) -> None:
    class Failing(LanguageModel):
        fails = False

        def hidden(self, *arguments: object) -> torch.Tensor:
            found = super().hidden(*arguments)  # type: ignore[arg-type]
            if self.fails:
                raise MemoryError
            return found

    model = Failing(plain._model, plain.shape)
    views = [built.context.view(0.1) for built in contexts]
    expected = [answer_alone(plain, sequence(plain, v, [4, 5], SequenceOptions(9))) for v in views]
    batch = [sequence(model, view, [4, 5], SequenceOptions(9)) for view in views]
    for one in batch:
        prefill_question(model, one)
    together = TailBatch(plain.shape, dtype=plain.dtype)
    for _ in range(8):
        tokens = [one.tail.tokens for one in batch]
        model.fails = True
        with pytest.raises(MemoryError):
            decode_step(model, batch, together)
        assert [one.tail.tokens for one in batch] == tokens
        model.fails = False
        decode_step(model, batch, together)
    assert [one.generated for one in batch] == expected


def test_tails_of_very_unlike_lengths_are_not_padded(plain: LanguageModel) -> None:
    def tails(*lengths: int) -> list[Tail]:
        made = []
        for length in lengths:
            tail = Tail(plain.shape, dtype=plain.dtype, device=plain.device)
            tail.reserve(length)
            tail.extend(length)
            made.append(tail)
        return made

    assert is_worthwhile(tails(10, 30, 12), 10_000)
    assert not is_worthwhile(tails(10), 10_000)
    assert not is_worthwhile(tails(5, 5, 5, 5, 5, 400), 10_000)
    # Three places of 64 rows.
    assert is_worthwhile(tails(10, 63, 12), 192)
    assert not is_worthwhile(tails(10, 63, 12), 191)
    assert not is_worthwhile(tails(10, 64, 12), 192)


def test_a_batch_has_never_more_memory_than_its_sequences_have_reserved_for_it(
    plain: LanguageModel, contexts: list[BuiltCache]
) -> None:
    view = contexts[0].context.view(0.1)
    row_bytes = plain.shape.full_bytes(1, plain.dtype)

    def asked(question_tokens: int, answer_tokens: int) -> Sequence:
        ids = [1 + n % 50 for n in range(question_tokens)]
        return sequence(plain, view, ids, SequenceOptions(answer_tokens))

    kinds = [*((150, 4 + 6 * n) for n in range(6)), (3, 50)]
    alone = [answer_alone(plain, asked(*kind)) for kind in kinds]
    # The last one comes when the first has gone.
    waiting = [asked(*kind) for kind in kinds]
    all_of_them, running = list(waiting), list[Sequence]()
    together, sizes = TailBatch(plain.shape, dtype=plain.dtype), list[int]()
    while waiting or running:
        while waiting and len(running) < 6:
            prefill_question(plain, waiting[0])
            running.append(waiting.pop(0))
        decode_step(plain, running, together)
        reserved = sum(one.place_rows for one in running) * row_bytes
        assert together.size_bytes <= reserved
        sizes.append(together.size_bytes)
        running = [one for one in running if one.finish_reason is None]
    assert [one.generated for one in all_of_them] == alone
    # It was there, became smaller while some went on, and a lone one has no use for it.
    assert max(sizes) == 6 * 192 * row_bytes <= 6 * place_rows(150) * row_bytes
    assert any(0 < after < before for before, after in itertools.pairwise(sizes))
    assert sizes[-1] == 0


@pytest.mark.parametrize("ends", ["cancelled", "answered"])
def test_what_tails_had_side_by_side_is_given_back_when_nothing_runs(
    plain: LanguageModel, contexts: list[BuiltCache], ends: str
) -> None:
    answering = Answering(plain, lambda: None, GraphOptions())
    tails = answering._tails
    assert isinstance(tails, TailBatch)
    view, listener = contexts[0].context.view(0.1), Listener()
    for n in range(3):
        asked = sequence(plain, view, [n + 1], SequenceOptions(5))
        answering.running.append(QueryTask(asked, listener))
    assert answering.read()
    assert answering.decode()
    assert tails.size_bytes > 0
    if ends == "cancelled":
        for task in answering.running:
            task.cancelled.set()
        answering.drop_cancelled()
    while answering.decode():
        pass
    assert tails.size_bytes == 0


@pytest.mark.parametrize("goes_last", [False, True], ids=["another-stays", "it-was-last"])
def test_what_is_not_finite_leaves_nothing_to_who_takes_its_place(
    plain: LanguageModel, goes_last: bool
) -> None:
    def tail(tokens: int, fill: float) -> Tail:
        one = Tail(plain.shape, dtype=torch.float32, device=plain.device)
        one.reserve(tokens)
        shape = plain.shape
        rows = torch.full((shape.num_kv_heads, tokens, shape.head_dim), fill)
        for layer in range(shape.num_layers):
            one.write(layer, rows, rows)
        one.extend(tokens)
        return one

    poisoned, stays, comes = tail(9, torch.nan), tail(5, 1.0), tail(2, 2.0)
    batch = TailBatch(plain.shape, dtype=torch.float32)
    batch.arrange([stays, poisoned] if goes_last else [poisoned, stays], 10_000)
    batch.arrange([stays, comes, tail(12, 3.0)], 10_000)
    row = torch.zeros(3, plain.shape.num_kv_heads, plain.shape.head_dim)
    found = batch.write(0, row, row)
    assert torch.isfinite(found.k).all()
    assert torch.isfinite(found.v).all()
