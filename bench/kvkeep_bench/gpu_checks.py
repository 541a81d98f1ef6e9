"""Whether the kernels are right on this device: against fp64 on fresh inputs, SDPA beside them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep_bench.gpu_values import GEMMA_SMALL, KINDS, LLAMA_8B, SMOLLM2, Shape, Values
from kvkeep_kernels import attention, compaction, reference, scoring
from kvkeep_kernels.layout import CodeKind, DecodeBatch, DecodeGroup, RaggedKV

# As large a share of SDPA's own error as ours may be, and what counts as no error at all.
_ALLOWED_SHARE = 2.0
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Check:
    """Largest error of one operation, and what was allowed."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """A NaN does not pass."""
        return self.error <= self.allowed


def run_checks(device: torch.device, *, small: bool) -> Iterator[Check]:
    """Every operation on skewed, empty and odd runs. ``small``: sizes for an interpreter."""
    dtypes = [torch.float32] if small else [torch.bfloat16, torch.float16, torch.float32]
    shapes = [SMOLLM2] if small else [LLAMA_8B, SMOLLM2, GEMMA_SMALL, Shape("96", 2, 5, 96)]
    for dtype in dtypes:
        for shape in shapes:
            values = Values(device, dtype, seed=len(shape.name))
            name = f"{str(dtype).removeprefix('torch.')}, {shape.name}"
            tokens = 40 if small else 5000
            yield _decode(f"decode, {name}", values, shape, tokens)
            yield _prefill(f"question, {name}", values, shape, tokens)
            yield _score(f"scores, {name}", values, shape, tokens)
            for kind in KINDS:
                yield _quantized(f"decode over {kind}, {name}", values, shape, tokens, kind)
    yield _gather("gather", Values(device, dtypes[0], seed=1), 40 if small else 5000)
    yield _select("select as on the CPU", device, 40 if small else 3000)


def _decode(name: str, values: Values, shape: Shape, tokens: int) -> Check:
    groups = []
    for members in (3, 1, 20):
        lengths = torch.randint(0, tokens, (shape.num_kv_heads,), dtype=torch.int32)
        lengths[0] = min(1, int(lengths[0]))
        tails = tuple(values.dense(shape, size) for size in range(1, members + 1))
        groups.append(DecodeGroup(values.context(shape, lengths), tails))
    batch = DecodeBatch(tuple(groups))
    q = values.queries(shape, batch.num_sequences)
    out = _poisoned(lambda: attention.ragged_decode_batch(q, batch, scale=shape.scale))
    exact, stock, row = torch.empty(out.shape, dtype=torch.float64, device=q.device), [], 0
    for group in groups:
        for tail in group.tails:
            for head in range(shape.num_kv_heads):
                heads = slice(head * shape.group_size, (head + 1) * shape.group_size)
                k, v = group.context.head_rows(head)
                keys, rows = torch.cat([k, tail.k[head]]), torch.cat([v, tail.v[head]])
                exact[row, heads] = _attend64(q[row, heads], keys, rows, shape.scale)
                sdpa = scaled_dot_product_attention(
                    q[row, heads][None, None], keys[None, None], rows[None, None], scale=shape.scale
                )
                stock.append(float((sdpa[0, 0].double() - exact[row, heads]).abs().max()))
            row += 1
    error = float((out.double() - exact).abs().max())
    return Check(name, error, max(_ROUNDING, _ALLOWED_SHARE * max(stock)))


def _quantized(name: str, values: Values, shape: Shape, tokens: int, kind: CodeKind) -> Check:
    """Against fp64 over the rows that the codes stand for, so that only the kernel can be wrong."""
    lengths = torch.randint(1, tokens, (shape.num_kv_heads,), dtype=torch.int32)
    context = values.quantized(shape, lengths, kind)
    tails = tuple(values.dense(shape, size) for size in (1, 40))
    q = values.queries(shape, 2)
    batch = DecodeBatch((DecodeGroup(context, tails),))
    out = _poisoned(lambda: attention.ragged_decode_batch(q, batch, scale=shape.scale))
    worst = 0.0
    for row, tail in enumerate(tails):
        for head in range(shape.num_kv_heads):
            heads = slice(head * shape.group_size, (head + 1) * shape.group_size)
            k, v = reference.head_rows(context, head)
            keys = torch.cat([k, tail.k[head].to(k.dtype)])
            rows = torch.cat([v, tail.v[head].to(v.dtype)])
            exact = _attend64(q[row, heads], keys, rows, shape.scale)
            worst = max(worst, float((out[row, heads].double() - exact).abs().max()))
    return Check(name, worst, 2e-2 if values.dtype != torch.float32 else 1e-3)


def _prefill(name: str, values: Values, shape: Shape, tokens: int) -> Check:
    lengths = torch.randint(0, tokens, (shape.num_kv_heads,), dtype=torch.int32)
    context, tail, new = values.context(shape, lengths), values.dense(shape, 37), 30
    q = values.normal(shape.num_q_heads, new, shape.head_dim)
    out = _poisoned(lambda: attention.ragged_prefill(q, context, tail, scale=shape.scale))
    worst, stock = 0.0, 0.0
    for head in range(shape.num_kv_heads):
        k, v = context.head_rows(head)
        keys, rows = torch.cat([k, tail.k[head]]), torch.cat([v, tail.v[head]])
        seen = torch.arange(len(keys), device=q.device)[None, :]
        limit = len(k) + tail.tokens - new + torch.arange(new, device=q.device)[:, None]
        for q_head in range(head * shape.group_size, (head + 1) * shape.group_size):
            exact = _attend64(q[q_head], keys, rows, shape.scale, seen <= limit)
            sdpa = scaled_dot_product_attention(
                q[None, q_head, None], keys[None, None], rows[None, None],
                attn_mask=(seen <= limit)[None, None], scale=shape.scale,
            )  # fmt: skip
            worst = max(worst, float((out[q_head].double() - exact).abs().max()))
            stock = max(stock, float((sdpa[0, 0].double() - exact).abs().max()))
    return Check(name, worst, max(_ROUNDING, _ALLOWED_SHARE * stock))


def _score(name: str, values: Values, shape: Shape, tokens: int) -> Check:
    prefix, chunk, repeat = (values.dense(shape, size).k for size in (7, tokens // 4, 50))
    q = values.normal(shape.num_q_heads, 33, shape.head_dim)
    lse = scoring.row_lse(q, prefix, chunk, repeat, scale=shape.scale)
    out = _poisoned(lambda: scoring.chunk_max_attention(q, chunk, lse, scale=shape.scale))
    worst = 0.0
    for head in range(shape.num_kv_heads):
        keys = torch.cat([prefix[head], chunk[head], repeat[head]]).double()
        rows = q[head * shape.group_size : (head + 1) * shape.group_size].double()
        logits = rows @ keys.T * shape.scale
        seen = torch.arange(len(keys), device=q.device)[None, :]
        limit = len(keys) - 33 + torch.arange(33, device=q.device)[:, None]
        weights = torch.softmax(logits.masked_fill(seen > limit, -torch.inf), dim=-1)
        own = weights[..., 7 : 7 + chunk.shape[1]].amax(dim=(0, 1))
        worst = max(worst, float((out[head].double() - own).abs().max()))
    return Check(name, worst, 2e-2 if values.dtype != torch.float32 else 1e-3)


def _gather(name: str, values: Values, tokens: int) -> Check:
    cache = values.dense(SMOLLM2, tokens)
    length = torch.tensor([tokens, 0, tokens // 3], dtype=torch.int32)
    position = torch.randint(0, tokens, (int(length.sum()),))
    found: RaggedKV = compaction.compact(cache, position, length)
    head = torch.repeat_interleave(torch.arange(3), length).to(values.device)
    where = position.to(values.device)
    same = torch.equal(found.k, cache.k[head, where]) and torch.equal(found.v, cache.v[head, where])
    return Check(name, 0.0 if same else float("inf"), 0.0)


def _select(name: str, device: torch.device, tokens: int) -> Check:
    # Few distinct values: ties everywhere.
    scores = torch.randint(0, 9, (4, 3, tokens)).float()
    protected = torch.rand(tokens) < 0.1
    here = compaction.select(scores.to(device), protected, (0.1, 0.3))
    there = compaction.select(scores, protected, (0.1, 0.3))
    same = torch.equal(here.counts.cpu(), there.counts) and all(
        torch.equal(ours.cpu(), theirs)
        for ours, theirs in zip(here.positions, there.positions, strict=True)
    )
    return Check(name, 0.0 if same else float("inf"), 0.0)


def _attend64(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    logits = q.double() @ k.double().T * scale
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    return torch.softmax(logits, dim=-1) @ v.double()


def _poisoned(compute: Callable[[], Tensor]) -> Tensor:
    """Run twice with NaN left in freed memory between: what is not written shows."""
    first = compute()
    poison = [torch.full_like(first, torch.nan) for _ in range(8)]
    del poison
    again = compute()
    return torch.where(first == again, again, torch.full_like(again, torch.nan))
