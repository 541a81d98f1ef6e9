"""Torch's flash attention of a GPU, as far as it can be known without one."""

import pytest
import torch

from kvkeep_kernels import stock_flash

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_operators_take_our_arguments_and_give_a_log_sum_exp_for_every_row(
    dtype: torch.dtype,
) -> None:
    q = torch.empty(2, 3, 33, 64, dtype=dtype, device="meta")
    keys = torch.empty(2, 1, 40, 64, dtype=dtype, device="meta").expand(2, 3, 40, 64)
    out, lse = stock_flash.attend(q, keys, keys, 0.125, is_causal=False)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)


def plain(q, k, v, scale, *, is_causal):
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )
    return out, lse


MUTANTS = {
    "no-lse": lambda *a, **o: (plain(*a, **o)[0], torch.zeros(2, 3, 33)),
    "not-a-number": lambda *a, **o: (plain(*a, **o)[0] * torch.nan, plain(*a, **o)[1]),
    "other-scale": lambda q, k, v, scale, **o: plain(q, k, v, 2 * scale, **o),
    "future-seen": lambda *a, **_: plain(*a, is_causal=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_probe_passes_right_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_flash, "attend", plain)
    assert stock_flash._error(CPU, dtype) <= stock_flash._TOLERANCES[dtype]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_probe_fails_wrong_kernels(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_flash, "attend", MUTANTS[mutant])
    assert not stock_flash._error(CPU, torch.bfloat16) <= 2e-2


def test_a_device_without_the_kernels_says_why() -> None:
    assert stock_flash.failure(CPU) == "flash attention needs a GPU, not cpu"
    if not torch.cuda.is_available():
        assert stock_flash.failure(torch.device("cuda", 0)) is not None
