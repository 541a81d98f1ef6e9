"""Single rows of bfloat16 take another way through linear layers, to the same place."""

import copy

import pytest
import torch
from torch import nn

from kvkeep_service.engine.one_row import OneRowLinear, multiply_single_rows_as_vectors

from .models import stock_model


@pytest.mark.parametrize("bias", [False, True], ids="bias={}".format)
@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (3, 96), (1, 3, 96)], ids=str)
def test_any_input_gets_what_a_stock_layer_gives(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    stock = nn.Linear(96, 40, bias=bias).bfloat16()
    ours = nn.Sequential(copy.deepcopy(stock))
    multiply_single_rows_as_vectors(ours)
    assert isinstance(ours[0], OneRowLinear)
    rows = torch.randn(shape).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(ours(rows), stock(rows), rtol=1e-2, atol=1e-2)


def test_a_model_keeps_its_weights_and_names_and_answers_as_before() -> None:
    stock = stock_model("qwen2").bfloat16()
    token = torch.tensor([[5]])
    with torch.inference_mode():
        before = stock(token).logits
    weights = dict(stock.named_parameters())
    multiply_single_rows_as_vectors(stock)
    assert not any(type(part) is nn.Linear for part in stock.modules())
    assert all(found is weights[name] for name, found in stock.named_parameters())
    with torch.inference_mode():
        torch.testing.assert_close(stock(token).logits, before, rtol=5e-2, atol=5e-2)
