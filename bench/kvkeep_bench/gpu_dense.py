"""Stock attention of one token over a full cache, in every way that may be the fastest."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvkeep_bench.gpu_clock import Step


def dense_ways(
    q: Tensor, folded: Tensor, caches: Sequence[tuple[Tensor, Tensor]], scale: float
) -> Iterator[tuple[str, list[Step]]]:
    """Name each way and give its steps, one for each of the caches.

    Shapes: q [batch, num_q_heads, 1, head_dim]; folded, the same as [batch, num_kv_heads,
    group, head_dim]; caches of k, v [batch, num_kv_heads, tokens, head_dim].
    """
    yield "SDPA, group as rows", [_rows(folded, k, v, scale) for k, v in caches]
    if q.is_cuda:
        steps = [_only_flash(_rows(folded, k, v, scale)) for k, v in caches]
        yield "SDPA flash, group as rows", steps
    flash = _flash_attention()
    if flash is not None:
        by_token = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in caches]
        steps = [_flash_step(flash, q.transpose(1, 2), k, v, scale) for k, v in by_token]
        yield "FlashAttention", steps


def _rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Step:
    return lambda: scaled_dot_product_attention(q, k, v, scale=scale)


def _only_flash(step: Step) -> Step:
    def run() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return step()

    return run


def _flash_attention() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    return flash_attn_with_kvcache


def _flash_step(
    flash: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Step:
    return lambda: flash(q, k, v, softmax_scale=scale)
