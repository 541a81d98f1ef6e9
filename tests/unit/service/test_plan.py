"""Registering and building plan alike, and whatever changes an answer changes the identity."""

import itertools
from dataclasses import replace
from typing import get_args

import pytest
import torch

from kvkeep_kernels.remainder import CLUSTERS
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.engine.remainders import REMAINDER_VERSION
from kvkeep_service.errors import BuildMismatch, DocumentTooLong, HeadScoresMissing, InvalidRequest
from kvkeep_service.plan import BANDS, Planner, band_ratios
from kvkeep_service.policies.choose import MIN_DOCUMENT_TOKENS
from kvkeep_service.policies.head_scores import HeadScores
from kvkeep_service.policies.kvzip import CHUNK_TOKENS
from kvkeep_service.ports import CompressionSpec, DocumentSpec, PolicyName, Span
from kvkeep_storage.documents import DocumentBody

from ...support.documents import contract
from .tiny import LONG, RESERVE_TOKENS, SHORT, with_positions

PLAIN = CompressionSpec()
HEADS = ((0.5, 0.25), (0.125, 0.75))
STORED = DocumentBody(
    text=SHORT.text,
    system=None,
    instructions=None,
    protect=(),
    prefix_text="",
    policy="kvzip",
    ratio=0.3,
    scoring="local",
)


@pytest.fixture(scope="module")
def planner(tiny: LoadedModel) -> Planner:
    return Planner(tiny)


def test_field_59_a_build_plans_what_registering_promised(planner: Planner) -> None:
    document = DocumentSpec(
        SHORT.text, "You are a lawyer.", "Read this lease:", (Span(0, 5), Span(40, 44))
    )
    promised = planner.plan("acme", document, PLAIN)
    again = planner.plan("acme", document, PLAIN, promised.prefix_text)
    assert again.fingerprint == promised.fingerprint
    assert again.document.ids == promised.document.ids
    assert again.document.prefix_ids == promised.document.prefix_ids
    assert torch.equal(again.document.protected, promised.document.protected)


def test_field_39_the_stored_prefix_is_used_whatever_the_template_would_write_now(
    planner: Planner,
) -> None:
    plan = planner.plan("acme", SHORT, PLAIN, "Another prefix. ")
    assert plan.prefix_text == "Another prefix. "
    assert plan.fingerprint.digest != planner.plan("acme", SHORT, PLAIN).fingerprint.digest


def test_the_ratio_is_no_part_of_the_identity(planner: Planner) -> None:
    digests = {
        planner.plan("acme", SHORT, CompressionSpec(ratio=ratio)).fingerprint.digest
        for ratio in (0.1, 0.3, 1.0)
    }
    assert len(digests) == 1


def test_field_10_everything_that_changes_an_answer_changes_the_identity(
    planner: Planner, tiny: LoadedModel
) -> None:
    def digest(
        tenant: str = "acme",
        document: DocumentSpec = SHORT,
        compression: CompressionSpec = PLAIN,
        by: Planner = planner,
    ) -> str:
        return by.plan(tenant, document, compression).fingerprint.digest

    calibrated = Planner(tiny, HeadScores(HEADS, "digest"))
    other_weights = replace(tiny, info=replace(tiny.info, weights_digest="sha256:other"))
    other_dtype = replace(tiny, info=replace(tiny.info, dtype="bfloat16"))
    other_rope = replace(tiny, rope='{"rope_theta": 1}')
    digests = [
        digest(),
        digest(tenant="other"),
        digest(document=replace(SHORT, text=SHORT.text + ".")),
        digest(document=replace(SHORT, system="Be brief.")),
        digest(document=replace(SHORT, instructions="Be brief.")),
        digest(document=replace(SHORT, protect=(Span(0, 1),))),
        digest(compression=CompressionSpec(policy="none")),
        digest(compression=CompressionSpec(scoring="exact")),
        digest(compression=CompressionSpec(normalization="kvzip_plus")),
        *(
            digest(compression=CompressionSpec(policy=name), by=calibrated)
            for name in ("kvzip_head", "snapkv", "expected_attention", "streaming", "random")
        ),
        digest(
            compression=CompressionSpec(policy="kvzip_head"),
            by=Planner(tiny, HeadScores(HEADS, "of another calibration")),
        ),
        digest(compression=CompressionSpec(neighbours=1)),
        digest(compression=CompressionSpec(neighbours=2)),
        digest(compression=CompressionSpec(remainder=False)),
        digest(compression=CompressionSpec(quantization="int8")),
        digest(compression=CompressionSpec(quantization="int4")),
        digest(compression=CompressionSpec(quantization="fp8")),
        digest(by=Planner(other_weights)),
        digest(by=Planner(other_dtype)),
        digest(by=Planner(other_rope)),
        # Fewer positions leave room for smaller chunks only.
        digest(by=Planner(with_positions(tiny, 600))),
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_field_59_a_stored_document_is_planned_with_its_own_policy(
    tiny: LoadedModel, name: PolicyName
) -> None:
    planner = Planner(tiny, HeadScores(HEADS, "digest"))
    promised = planner.plan("acme", SHORT, CompressionSpec(policy=name))
    stored = STORED.model_copy(
        update={"policy": name, "prefix_text": promised.prefix_text, "remainder": True}
    )
    again = planner.plan_stored("acme", stored)
    assert again.fingerprint == promised.fingerprint
    assert again.policy_applied == promised.policy_applied == name
    assert again.ratio == promised.ratio == (1.0 if name == "none" else 0.3)


def test_a_document_of_an_older_version_has_the_identity_it_had(planner: Planner) -> None:
    """KVzip's parameters are what they were when it was the only policy."""
    plan = planner.plan_stored("acme", STORED)
    assert (plan.fingerprint.policy, plan.fingerprint.policy_version) == ("kvzip", 1)
    assert plan.fingerprint.policy_parameters == {"scoring": "local", "chunk_tokens": 544}
    newer = planner.plan_stored("acme", STORED.model_copy(update={"remainder": True})).fingerprint
    assert newer.policy_parameters == {
        **plan.fingerprint.policy_parameters,
        "remainder": CLUSTERS,
        "remainder_version": REMAINDER_VERSION,
    }
    assert not plan.has_remainder
    assert planner.plan("acme", SHORT, CompressionSpec()).has_remainder
    assert not planner.plan("acme", SHORT, CompressionSpec(policy="none")).has_remainder
    kept = planner.plan_stored("acme", STORED.model_copy(update={"policy": "none"})).fingerprint
    assert (kept.policy, kept.policy_version, dict(kept.policy_parameters)) == ("none", 1, {})


def test_a_stored_policy_that_is_not_known_here_is_refused(planner: Planner) -> None:
    with pytest.raises(BuildMismatch, match="kvpop"):
        planner.plan_stored("acme", STORED.model_copy(update={"policy": "kvpop"}))


@pytest.mark.parametrize("document", [SHORT, DocumentSpec("A short text.")])
def test_whole_heads_are_refused_where_nobody_measured_them(
    planner: Planner, document: DocumentSpec
) -> None:
    with pytest.raises(HeadScoresMissing, match="kvkeep-server calibrate"):
        planner.plan("acme", document, CompressionSpec(policy="kvzip_head"))


def test_a_budget_of_tokens_is_the_share_of_what_may_be_evicted(planner: Planner) -> None:
    protect = (Span(100, 200),)
    document = replace(SHORT, protect=protect)
    plan = planner.plan("acme", document, CompressionSpec(tokens=100))
    eligible = len(plan.document.ids) - int(plan.document.protected.sum())
    assert plan.ratio == 100 / eligible
    assert plan.fingerprint == planner.plan("acme", document, PLAIN).fingerprint
    assert planner.plan("acme", document, CompressionSpec(tokens=10_000)).ratio == 1.0
    with pytest.raises(InvalidRequest, match="send at least"):
        planner.plan("acme", document, CompressionSpec(tokens=1))
    # Nothing is evicted from it, so no budget is too small.
    short = planner.plan("acme", DocumentSpec("A short text."), CompressionSpec(tokens=1))
    assert (short.policy, short.ratio) == (None, 1.0)


def test_int4_is_refused_by_name_where_heads_have_an_odd_width(tiny: LoadedModel) -> None:
    odd = Planner(replace(tiny, info=replace(tiny.info, head_dim=65)))
    assert odd.plan("acme", SHORT, CompressionSpec(quantization="int8")).quantization == "int8"
    with pytest.raises(InvalidRequest) as refused:
        odd.plan("acme", SHORT, CompressionSpec(quantization="int4"))
    assert refused.value.field == "compression.quantization"
    assert "65" in refused.value.reason


@pytest.mark.parametrize(
    "span", [Span(0, 1), Span(7, 8), Span(0, 40), Span(100, 333), Span(100, len(SHORT.text))]
)
def test_every_token_that_touches_a_protected_span_is_protected(
    planner: Planner, tiny: LoadedModel, span: Span
) -> None:
    plan = planner.plan("acme", replace(SHORT, protect=(span,)), PLAIN)
    offsets = tiny.template.document_piece(SHORT.text).offsets
    for (begin, end), is_protected in zip(offsets, plan.document.protected, strict=True):
        touched = set(range(begin, end)) & set(range(span.start, span.end))
        assert bool(is_protected) == bool(touched)
    protected = int(plan.document.protected.sum())
    assert plan.num_protected == plan.document.num_prefix + protected
    (run,) = plan.fingerprint.protected
    assert run[1] - run[0] == protected


@pytest.mark.parametrize("span", [Span(-1, 3), Span(3, 3), Span(5, 3), Span(0, 10_000)])
def test_a_span_outside_the_document_is_refused_by_its_number(planner: Planner, span: Span) -> None:
    document = DocumentSpec("A short text.", protect=(Span(0, 3), span))
    with pytest.raises(InvalidRequest) as refused:
        planner.plan("acme", document, PLAIN)
    assert refused.value.field == "protect[1]"
    assert "<= 13" in refused.value.reason


def test_a_document_that_leaves_no_room_for_questions_is_refused_with_both_numbers(
    tiny: LoadedModel,
) -> None:
    total = Planner(tiny).plan("acme", LONG, PLAIN).document.num_tokens
    fits = with_positions(tiny, total + RESERVE_TOKENS)
    assert Planner(fits).plan("acme", LONG, PLAIN).document.num_tokens == total
    with pytest.raises(DocumentTooLong) as refused:
        Planner(with_positions(tiny, total + RESERVE_TOKENS - 1)).plan("acme", LONG, PLAIN)
    assert (refused.value.tokens, refused.value.max_tokens) == (total, total - 1)


def test_field_41_a_document_too_short_to_evict_from_is_kept_whole(planner: Planner) -> None:
    words = " pear" * 1000
    lengths = {}
    for count in range(1, 400):
        plan = planner.plan("acme", DocumentSpec(words[: 5 * count]), PLAIN)
        lengths[len(plan.document.ids)] = plan.policy_applied
    assert lengths[MIN_DOCUMENT_TOKENS - 1] == "none"
    assert lengths[MIN_DOCUMENT_TOKENS] == "kvzip"


def test_chunks_shrink_where_few_positions_are_left(tiny: LoadedModel) -> None:
    total = Planner(tiny).plan("acme", LONG, PLAIN).document.num_tokens
    roomy, tight = Planner(tiny), Planner(with_positions(tiny, total + RESERVE_TOKENS))
    for scoring in CHUNK_TOKENS:
        compression = CompressionSpec(scoring=scoring)
        policy = roomy.plan("acme", LONG, compression).policy
        assert policy is not None
        assert policy.chunk_tokens == CHUNK_TOKENS[scoring]
        policy = tight.plan("acme", LONG, compression).policy
        assert policy is not None
        assert total + policy.chunk_tokens < total + RESERVE_TOKENS


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.07, 0.3, 0.33, 1.0])
def test_an_artifact_is_cut_at_every_band_below_its_ratio_and_where_others_rely_on(
    ratio: float,
) -> None:
    cuts = band_ratios(ratio, kept_before=(0.02, 0.25, 0.3))
    assert all(low < high for low, high in itertools.pairwise(cuts))
    assert cuts[-1] == ratio
    assert set(cuts[:-1]) == {cut for cut in (*BANDS, 0.02, 0.25) if cut < ratio}


def test_a_longer_document_of_the_same_beginning_is_another(planner: Planner) -> None:
    plans = [
        planner.plan("acme", DocumentSpec(contract("Lease", clauses)), PLAIN)
        for clauses in (10, 11)
    ]
    assert plans[1].document.ids[: len(plans[0].document.ids)] == plans[0].document.ids
    assert plans[0].fingerprint.digest != plans[1].fingerprint.digest
