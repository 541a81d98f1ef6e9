"""Tails that are used again, and the probabilities of what was picked."""

import pytest
import torch

from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import Tail
from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.sampling import Sampler, SamplingOptions, picked
from kvkeep_service.engine.scheduler import Scheduler

from .gated import WORDS, GatedModel, answer_alone, sequence, submit
from .models import VOCABULARY

# A matrix product gives other last bits when other rows stand beside.
ROUNDING = 1e-4


def words(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def continued(model: LanguageModel, context: BuiltCache, ids: list[int], tail: Tail) -> Sequence:
    return Sequence(
        model,
        context.context.view(0.3),
        ids,
        SequenceOptions(8),
        tokenizer=WORDS,
        stop_ids=frozenset(),
        tail=tail,
    )


@pytest.mark.parametrize("kept", [1, 63, 64, 300])
def test_a_question_that_goes_on_from_a_tail_is_answered_as_one_read_whole(
    plain: LanguageModel, contexts: list[BuiltCache], kept: int
) -> None:
    view = contexts[0].context.view(0.3)
    earlier = sequence(plain, view, words(300, 1), SequenceOptions(6))
    answer_alone(plain, earlier)
    so_far = [*earlier.question_ids, *earlier.generated[:-1]]
    assert earlier.tail.tokens == len(so_far)

    ids = [*so_far[:kept], *words(5, 2)]
    whole = answer_alone(plain, sequence(plain, view, ids, SequenceOptions(8)))
    again = continued(plain, contexts[0], ids, earlier.tail.copied(kept))
    assert again.num_reused == kept
    assert answer_alone(plain, again) == whole
    # The copy is one: the tail it was made of still continues as itself.
    third = continued(plain, contexts[0], ids, earlier.tail.copied(kept))
    assert answer_alone(plain, third) == whole


def test_a_copied_tail_takes_no_more_room_than_its_tokens(
    plain: LanguageModel, contexts: list[BuiltCache]
) -> None:
    asked = sequence(plain, contexts[0].context.view(0.3), words(70, 1), SequenceOptions(2))
    answer_alone(plain, asked)
    shape = plain.shape
    row_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    assert asked.tail.copied(71).size_bytes == 71 * row_bytes < asked.tail.size_bytes


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([0.0, 3.0, -torch.inf, 1.0, 2.0])
    expected = torch.log_softmax(logits.double(), dim=0).tolist()
    noted = picked(logits, 3, 2)
    assert noted.chosen.token_id == 3
    assert noted.chosen.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [chance.token_id for chance in noted.top] == [1, 4]
    assert [chance.logprob for chance in noted.top] == pytest.approx([expected[1], expected[4]])
    assert picked(logits, 0, 0).top == ()
    assert len(picked(logits, 0, 20).top) == len(logits)


def test_logprobs_do_not_depend_on_sampling_options_or_on_who_is_in_the_batch(
    scheduler: Scheduler, model: GatedModel, contexts: list[BuiltCache]
) -> None:
    def asked(seed: int, context: int) -> Sequence:
        sampling = SamplingOptions(temperature=0.7, top_p=0.9, top_k=50, seed=seed)
        options = SequenceOptions(12, sampling, top_logprobs=3)
        view = contexts[context].context.view(0.3)
        return sequence(model, view, words(9, seed), options)

    alone = asked(1, 0)
    answer_alone(model, alone)
    model.hold_after(0)
    together = [asked(seed, seed % 3) for seed in range(7)] + [asked(1, 0)]
    listeners = [submit(scheduler, one)[1] for one in together]
    model.release()
    for listener in listeners:
        assert listener.wait().error is None
    assert together[-1].generated == alone.generated
    assert max(model.batches) == 8
    for one, other in zip(together[-1].logprobs, alone.logprobs, strict=True):
        assert one.chosen.token_id == other.chosen.token_id
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=ROUNDING)
        assert one.top[0].logprob >= one.chosen.logprob - ROUNDING
    assert len(alone.logprobs) == len(alone.generated)


def test_nothing_is_noted_for_who_does_not_ask(
    plain: LanguageModel, contexts: list[BuiltCache]
) -> None:
    asked = sequence(plain, contexts[0].context.view(0.3), [1, 2], SequenceOptions(3))
    answer_alone(plain, asked)
    assert asked.logprobs == []


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.9}, {"top_k": 2000}, {"top_p": 0.95, "top_k": 5000}],
    ids=["all", "top_p", "top_k", "both"],
)
def test_a_draw_is_not_changed_by_logits_that_change_places_in_rounding(
    options: dict[str, float],
) -> None:
    generator = torch.Generator().manual_seed(5)
    # So many that neighbours in the ranking are closer than a rounding error.
    logits = torch.randn(50_000, generator=generator)
    rounded = logits + 1e-6 * torch.randn(50_000, generator=generator)
    assert not torch.equal(logits.argsort(), rounded.argsort())

    def draws(values: torch.Tensor) -> list[int]:
        sampler = Sampler(SamplingOptions(temperature=1.5, seed=9, **options))  # type: ignore[arg-type]  # numbers
        return [sampler.pick(values) for _ in range(40)]

    assert draws(logits) == draws(rounded)
    assert len(set(draws(logits))) > 20
