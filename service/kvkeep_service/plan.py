"""From a document and its options to what will be built: tokens, identity, policy.

Registering and building both plan, from the same stored facts, and must get the same
fingerprint: that is how a build knows that it builds what was promised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from kvkeep_service.auto_ratio import AutoRatio
from kvkeep_service.budget import LOSSY_BELOW, RATIO_MIN, ratio_of_tokens
from kvkeep_service.engine.build import ScoringPolicy
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.errors import BuildMismatch, DocumentTooLong, InvalidRequest
from kvkeep_service.policies.choose import PolicyChoice
from kvkeep_service.policies.head_scores import HeadScores
from kvkeep_service.policies.kvzip import RepeatPrompts
from kvkeep_service.ports import (
    CompressionSpec,
    DocumentSpec,
    Normalization,
    PolicyName,
    Quantization,
    Span,
)
from kvkeep_storage.documents import DocumentBody
from kvkeep_storage.fingerprint import Fingerprint, ModelIdentity, digest_token_ids

BANDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Ratios (fractions kept) at which every artifact up to its own ratio can be read."""
_NO_POLICY_VERSION = 1


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What to build. ``policy`` None keeps every row, and then ``ratio`` is 1.0.

    ``candidates``: where the ratio is to be found, those that it may be; ``ratio`` is the last.

    ``quantization``: how its rows are kept. ``repeat_prompt``: what asks for a repetition.
    """

    document: DocumentTokens
    prefix_text: str
    fingerprint: Fingerprint
    policy: ScoringPolicy | None
    ratio: float
    quantization: Quantization
    repeat_prompt: tuple[int, ...]
    candidates: tuple[float, ...]

    @property
    def policy_applied(self) -> str:
        """The policy that really decides: "none" where nothing may be evicted."""
        return self.policy.name if self.policy else "none"

    @property
    def has_remainder(self) -> bool:
        """Whether what is evicted leaves a few rows of each head."""
        return self.policy is not None and "remainder" in self.policy.parameters

    @property
    def num_protected(self) -> int:
        """Tokens that are never evicted: the prefix and the user's spans."""
        return self.document.num_prefix + int(self.document.protected.sum())


class Planner:
    """Plans for one loaded model. Safe in several threads."""

    def __init__(self, loaded: LoadedModel, head_scores: HeadScores | None = None) -> None:
        """Tokenise the policies' prompts once. ``head_scores``: of this model, if calibrated."""
        self._loaded = loaded
        info = loaded.info
        prompts = RepeatPrompts.from_template(loaded.template)
        self._repeat_prompt = (*prompts.first, *prompts.turn_end)
        self._choice = PolicyChoice(loaded.language_model, prompts, head_scores)
        self.identity = ModelIdentity(
            model=info.name,
            weights_digest=info.weights_digest,
            tokenizer_digest=loaded.template.digest,
            dtype=info.dtype,
            rope=loaded.rope,
            num_layers=info.num_layers,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            adapter_digest="",
        )

    def plan(
        self,
        tenant: str,
        document: DocumentSpec,
        compression: CompressionSpec,
        prefix_text: str | None = None,
    ) -> BuildPlan:
        """Tokenise and identify. ``prefix_text``: the stored one, when the document has one.

        Raises: DocumentTooLong; InvalidRequest for a span outside the document, text the chat
            template refuses, a quantisation that the model's heads cannot have, or a budget that
            keeps too little of this document; HeadScoresMissing.
        """
        _check_quantization(compression.quantization, self.identity.head_dim)
        template, info = self._loaded.template, self._loaded.info
        parts = (document.text, document.system or "", document.instructions or "")
        fewest = sum(template.fewest_tokens(part) for part in parts)
        if fewest > info.max_document_tokens:
            raise DocumentTooLong(fewest, info.max_document_tokens)
        if prefix_text is None:
            prefix_text = template.frame(document.system, document.instructions).prefix
        prefix_ids = template.prefix_ids(prefix_text)
        piece = template.document_piece(document.text)
        total = len(prefix_ids) + len(piece.ids)
        if total > info.max_document_tokens:
            raise DocumentTooLong(total, info.max_document_tokens)
        protected = _protected(document, piece.offsets)
        tokens = DocumentTokens(prefix_ids, piece.ids, protected)
        policy = self._choice.choose(compression, tokens)
        open_ratios = _candidates(compression, policy)
        ratio = 1.0 if policy is None or open_ratios else _ratio(compression, tokens)
        fingerprint = self._fingerprint(tenant, prefix_text, tokens, compression, policy)
        return BuildPlan(
            tokens,
            prefix_text,
            fingerprint,
            policy,
            ratio,
            compression.quantization,
            self._repeat_prompt,
            open_ratios,
        )

    def plan_stored(self, tenant: str, body: DocumentBody) -> BuildPlan:
        """Plan a registered document again, under the prefix it was registered with.

        Raises: as ``plan``; BuildMismatch, for options that this version does not know.
        """
        spans = tuple(Span(start, end) for start, end in body.protect)
        document = DocumentSpec(body.text, body.system, body.instructions, spans)
        compression = CompressionSpec(
            policy=_stored_policy(body.policy),
            ratio=body.ratio,
            scoring="exact" if body.scoring == "exact" else "local",
            quantization=_stored_quantization(body.quantization),
            normalization=_stored_normalization(body.normalization),
            neighbours=body.neighbours,
            remainder=body.remainder,
            max_loss=body.max_loss,
            allow_lossy=body.ratio_from is not None and body.ratio_from < LOSSY_BELOW,
        )
        return self.plan(tenant, document, compression, body.prefix_text)

    def _fingerprint(
        self,
        tenant: str,
        prefix_text: str,
        document: DocumentTokens,
        compression: CompressionSpec,
        policy: ScoringPolicy | None,
    ) -> Fingerprint:
        identity = self.identity
        return Fingerprint(
            model=identity.model,
            weights_digest=identity.weights_digest,
            tokenizer_digest=identity.tokenizer_digest,
            prefix_text=prefix_text,
            dtype=identity.dtype,
            rope=identity.rope,
            num_layers=identity.num_layers,
            num_kv_heads=identity.num_kv_heads,
            head_dim=identity.head_dim,
            token_ids_digest=digest_token_ids([*document.prefix_ids, *document.ids]),
            protected=_spans(document.protected),
            policy=policy.name if policy else "none",
            policy_version=policy.version if policy else _NO_POLICY_VERSION,
            policy_parameters=policy.parameters if policy else {},
            quantization=compression.quantization,
            adapter_digest=identity.adapter_digest,
            tenant_salt=tenant,
        )


def band_ratios(ratio: float, kept_before: Sequence[float] = ()) -> tuple[float, ...]:
    """Where to cut an artifact of this ratio; ``kept_before``: cuts that contexts rely on."""
    cuts = {cut for cut in (*BANDS, *kept_before) if cut < ratio}
    return (*sorted(cuts), ratio)


def candidates(lowest: float, highest: float) -> tuple[float, ...]:
    """The ratios from ``lowest`` to ``highest`` of which one may be found."""
    return tuple(cut for cut in BANDS if lowest <= cut <= highest)


def ratios_to_build(
    plan: BuildPlan, ratio: float, max_loss: float | None, relied_on: Sequence[float]
) -> tuple[float, ...] | AutoRatio:
    """Where to cut what a plan builds for a context of this ratio, or what is to decide it.

    With ``max_loss`` the ratio is to be found. ``relied_on``, what the committed cache is cut at,
    stays readable, up to the highest.
    """

    def cuts(own: float) -> tuple[float, ...]:
        return band_ratios(max(own, *relied_on, 0.0), (*relied_on, own))

    return cuts(ratio) if max_loss is None else AutoRatio(plan.candidates, max_loss, cuts)


def _candidates(compression: CompressionSpec, policy: ScoringPolicy | None) -> tuple[float, ...]:
    """The ratios to choose from where a loss was asked for; none where nothing can be lost."""
    if compression.max_loss is None or (policy is None and compression.quantization == "none"):
        return ()
    lowest = RATIO_MIN if compression.allow_lossy else LOSSY_BELOW
    return (1.0,) if policy is None else candidates(lowest, 1.0)


def _ratio(compression: CompressionSpec, document: DocumentTokens) -> float:
    if compression.tokens is None:
        return compression.ratio
    num_eligible = len(document.ids) - int(document.protected.sum())
    return ratio_of_tokens(compression.tokens, num_eligible, allow_lossy=compression.allow_lossy)


def _check_quantization(quantization: Quantization, head_dim: int) -> None:
    if quantization == "int4" and head_dim % 2:
        raise InvalidRequest(
            "compression.quantization",
            f"int4 needs heads of an even width, and this model's have {head_dim}",
        )


def _stored_policy(name: str) -> PolicyName:
    known: tuple[PolicyName, ...] = get_args(PolicyName)
    for policy in known:
        if policy == name:
            return policy
    raise _unknown("compression.policy", name)


def _stored_normalization(name: str) -> Normalization:
    match name:
        case "none" | "kvzip_plus" as known:
            return known
        case unknown:
            raise _unknown("compression.normalization", unknown)


def _stored_quantization(name: str) -> Quantization:
    match name:
        case "none" | "int8" | "int4" | "fp8" as known:
            return known
        case unknown:
            raise _unknown("compression.quantization", unknown)


def _unknown(field: str, name: str) -> BuildMismatch:
    return BuildMismatch(f"it was registered with {field} {name!r}, unknown to this version")


def _protected(document: DocumentSpec, offsets: Sequence[tuple[int, int]]) -> Tensor:
    """Mark every token that overlaps a protected span. Returns [document tokens] bool."""
    marks = torch.zeros(len(offsets), dtype=torch.bool)
    if not document.protect:
        return marks
    begin = torch.tensor([offset[0] for offset in offsets])
    end = torch.tensor([offset[1] for offset in offsets])
    for index, span in enumerate(document.protect):
        _check_span(index, span, len(document.text))
        marks |= (begin < span.end) & (end > span.start)
    return marks


def _check_span(index: int, span: Span, length: int) -> None:
    if not 0 <= span.start < span.end <= length:
        raise InvalidRequest(
            f"protect[{index}]", f"needs 0 <= start < end <= {length}, the document's characters"
        )


def _spans(marks: Tensor) -> tuple[tuple[int, int], ...]:
    """Half-open runs of marked tokens."""
    spans: list[tuple[int, int]] = []
    for token in torch.nonzero(marks).flatten().tolist():
        if spans and spans[-1][1] == token:
            spans[-1] = (spans[-1][0], token + 1)
        else:
            spans.append((token, token + 1))
    return tuple(spans)
