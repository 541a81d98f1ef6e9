"""What a build measures of its own loss: against a stock model, and never more than a tenth."""

import pytest
import torch

from kvkeep_service.auto_ratio import MARGIN, REMAINDER_MARGIN, AutoRatio
from kvkeep_service.engine.attention import AttentionPass
from kvkeep_service.engine.cache import Tail
from kvkeep_service.engine.checking import LossUnreachable
from kvkeep_service.engine.fidelity import LEAD_TOKENS, SPAN_TOKENS, SideBySide, sample_of
from kvkeep_service.engine.forward import LayeredForward
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.passes import QuestionPass

from .gated import policy
from .masked_reference import MaskedReference
from .models import engine_model, random_document, run_build, stock_model
from .test_exactness import visible_positions

RATIOS = (0.1, 0.3, 0.6)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return engine_model(stock_model("llama"))


class CountedModel(LanguageModel):
    """A model that counts the rows of its forwards, those of measuring by forward."""

    def __init__(self, inner: LanguageModel) -> None:
        super().__init__(inner._model, inner.shape)
        self.total = 0
        self.measuring: list[int] = []

    def begin(self, token_ids: torch.Tensor, positions: torch.Tensor) -> LayeredForward:
        self.total += token_ids.numel()
        forward = super().begin(token_ids, positions)
        real = forward.run_layer

        def run_layer(layer: int, attention: AttentionPass) -> None:
            if layer == 0 and isinstance(attention, SideBySide):
                self.measuring.append(token_ids.numel())
            real(layer, attention)

        forward.run_layer = run_layer  # type: ignore[method-assign]
        return forward


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_losses_equal_a_dense_stock_model_that_sees_the_kept_rows(kind: str) -> None:
    document = random_document(1200, seed=3)
    stock = stock_model(kind)
    built = run_build(engine_model(stock), document, policy(), RATIOS)
    fidelity = built.fidelity
    assert fidelity is not None
    sample = sample_of(document.ids, document.num_tokens * 2)
    assert sample is not None
    assert (fidelity.spans, fidelity.tokens) == (sample.num_spans, len(sample.counted))
    assert [item.ratio for item in fidelity.ratios] == [0.3, 0.6]

    def loss(ratio: float | None) -> tuple[float, torch.Tensor]:
        reference = MaskedReference(stock)
        reference.forward([*document.prefix_ids, *document.ids], 0)
        if ratio is not None:
            reference.visible = visible_positions(built, ratio, document.num_tokens)
        logits = reference.forward(list(sample.ids[:-1]), document.num_tokens)
        rows = logits[list(sample.counted)].double()
        wanted = torch.tensor([sample.ids[row + 1] for row in sample.counted])
        return float(torch.nn.functional.cross_entropy(rows, wanted)), rows.argmax(-1)

    full, best = loss(None)
    assert fidelity.nll_full == pytest.approx(full, rel=1e-4)
    for item in fidelity.ratios:
        kept, kept_best = loss(item.ratio)
        assert item.nll_kept == pytest.approx(kept, rel=1e-4)
        assert item.top1_agreement == pytest.approx(float((kept_best == best).double().mean()))
        assert item.nll_kept != pytest.approx(full, rel=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("evicts", [True, False], ids=["kvzip", "none"])
def test_the_loss_is_that_of_the_rows_as_they_are_stored(
    model: LanguageModel, quantization: str, evicts: bool
) -> None:
    document = random_document(1600, seed=4)
    built = run_build(model, document, policy() if evicts else None, RATIOS, quantization)
    assert built.fidelity is not None
    num_read = document.num_tokens * (2 if evicts else 1)
    sample = sample_of(document.ids, num_read)
    assert sample is not None
    for item in built.fidelity.ratios:
        view = built.context.view(item.ratio)
        tail = Tail(model.shape, dtype=model.dtype, device=model.device)
        tail.reserve(sample.num_rows)
        positions = torch.arange(view.num_tokens, view.num_tokens + sample.num_rows)[None]
        ids = torch.tensor([sample.ids[:-1]])
        hidden = model.hidden(ids, positions, QuestionPass(view, tail))
        rows = model.logits(hidden[0, list(sample.counted)])
        wanted = torch.tensor([sample.ids[row + 1] for row in sample.counted])
        expected = float(torch.nn.functional.cross_entropy(rows, wanted))
        assert item.nll_kept == pytest.approx(expected, rel=1e-4)
    assert built.fidelity.ratios[-1].ratio == (0.6 if evicts else 1.0)


def test_measuring_is_within_a_tenth_of_the_build(model: LanguageModel) -> None:
    # A row of it costs 0.9 rows of a build: it attends to more, but is not scored.
    for tokens in (300, 800, 1100, 2600):
        document = random_document(tokens, seed=5)
        counted = CountedModel(model)
        run_build(counted, document, policy(), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
        measuring = sum(counted.measuring)
        assert 0.9 * measuring <= 0.1 * counted.total
        assert (measuring > 0) == (tokens > 300)
        assert max(counted.measuring, default=0) <= 512


def test_the_same_document_is_measured_alike_at_every_build(model: LanguageModel) -> None:
    document = random_document(1200, seed=6)
    once, again, higher = (
        run_build(model, document, policy(), ratios).fidelity
        for ratios in (RATIOS, RATIOS, (0.1, 0.3, 0.6, 0.8))
    )
    assert once == again
    assert once is not None
    assert higher is not None
    assert higher.nll_full == pytest.approx(once.nll_full, rel=1e-6)
    at_once, at_higher = once.at(0.6), higher.at(0.6)
    assert at_once is not None
    assert at_higher is not None
    assert at_higher.nll_kept == pytest.approx(at_once.nll_kept, rel=1e-5)


def test_a_prompt_stands_before_the_spans_and_counts_as_work() -> None:
    ids, prompt = list(range(10_000, 14_000)), range(30)
    without, asked = sample_of(ids, 8000), sample_of(ids, 8000, prompt)
    assert without is not None
    assert asked is not None
    assert asked.ids[:30] == tuple(prompt)
    assert min(asked.counted) == 30 + LEAD_TOKENS - 1
    assert (asked.num_ratios + 1) * len(asked.ids) <= 0.11 * 8000
    assert sample_of(ids, 1000) is not None
    assert sample_of(ids, 1000, prompt) is None


def test_spans_are_pieces_of_the_document_spread_over_it() -> None:
    ids = list(range(10_000, 14_000))
    sample = sample_of(ids, 2 * len(ids))
    assert sample is not None
    assert sample_of(ids, 2 * len(ids)) == sample
    pieces = [sample.ids[i : i + SPAN_TOKENS] for i in range(0, len(sample.ids), SPAN_TOKENS)]
    assert len(pieces) == sample.num_spans == 6
    assert all(piece == tuple(range(piece[0], piece[0] + SPAN_TOKENS)) for piece in pieces)
    assert sorted((piece[0] - 10_000) * len(pieces) // len(ids) for piece in pieces) == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    counted = {sample.ids[row + 1] for row in sample.counted}
    assert counted == {token for piece in pieces for token in piece[LEAD_TOKENS:]}


def test_all_rows_as_they_are_lose_nothing_by_definition(model: LanguageModel) -> None:
    built = run_build(model, random_document(1200, seed=7), policy(), (0.3, 1.0))
    assert built.fidelity is not None
    whole = built.fidelity.at(1.0)
    assert whole is not None
    assert (whole.nll_kept, whole.top1_agreement) == (built.fidelity.nll_full, 1.0)


@pytest.mark.parametrize("tokens", [300, 1200])
def test_where_nothing_is_lost_nothing_is_measured(model: LanguageModel, tokens: int) -> None:
    assert run_build(model, random_document(tokens), None, (1.0,)).fidelity is None


def auto(max_loss: float) -> AutoRatio:
    return AutoRatio((0.2, 0.3, 0.5, 0.8, 1.0), max_loss, lambda ratio: (0.1, ratio))


def test_auto_builds_what_the_ratio_it_finds_would_have_built(model: LanguageModel) -> None:
    document = random_document(3500, seed=8)
    known = run_build(model, document, policy(), (0.2, 0.3, 0.5, 0.8, 1.0)).fidelity
    assert known is not None
    losses = sorted(
        item.nll_kept - known.nll_full + MARGIN * item.loss_error for item in known.ratios
    )
    limit = losses[len(losses) // 2]
    built = run_build(model, document, policy(), auto(limit))
    assert built.chosen is not None
    assert built.context.ratios == (0.1, built.chosen)
    fixed = run_build(model, document, policy(), (0.1, built.chosen))
    for found, wanted in zip(built.context.layers, fixed.context.layers, strict=True):
        assert torch.equal(found.k, wanted.k)
    measured = built.fidelity
    assert measured is not None
    chosen = measured.at(built.chosen)
    assert chosen is not None
    assert chosen.nll_kept - measured.nll_full + MARGIN * chosen.loss_error <= limit


@pytest.mark.parametrize("remainder", [True, False])
def test_auto_counts_fewer_standard_errors_where_there_are_remainders(
    model: LanguageModel, remainder: bool
) -> None:
    document, rule = random_document(1200, seed=8), policy(remainder=remainder)
    known = run_build(model, document, rule, (0.1, 0.3)).fidelity
    at = known.at(0.3) if known else None
    assert known is not None
    assert at is not None
    between = (MARGIN + REMAINDER_MARGIN) / 2 * at.loss_error
    # Of random weights some rows may foretell more than all.
    loss = max(0.0, at.nll_kept - known.nll_full)
    asked = AutoRatio((0.3,), loss + between, lambda ratio: (0.1, ratio))
    if remainder:
        assert run_build(model, document, rule, asked).chosen == 0.3
    else:
        with pytest.raises(LossUnreachable, match=f"the {MARGIN} standard errors"):
            run_build(model, document, rule, asked)


def test_auto_keeps_everything_where_no_less_will_do(model: LanguageModel) -> None:
    assert run_build(model, random_document(1200, seed=9), policy(), auto(0.0)).chosen == 1.0


def test_auto_trusts_nothing_that_it_cannot_measure(model: LanguageModel) -> None:
    built = run_build(model, random_document(300, seed=9), policy(), auto(100.0))
    assert (built.chosen, built.fidelity) == (1.0, None)


def test_auto_says_so_where_even_all_rows_lose_too_much(model: LanguageModel) -> None:
    with pytest.raises(LossUnreachable) as raised:
        run_build(model, random_document(1600, seed=9), policy(), auto(0.0), "int4")
    assert raised.value.ratio == 1.0
    assert raised.value.loss > raised.value.measured >= 0.0
    told = str(raised.value)
    assert f"{raised.value.measured:.4g} nats per token were lost as measured" in told
    assert f"{raised.value.loss:.4g} with the {MARGIN} standard errors" in told
    assert told.endswith("max_loss is 0.0")
