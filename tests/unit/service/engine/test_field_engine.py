"""Faults that other engines had, as promises of ours."""

from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.decode import SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.template import ChatTemplate
from kvkeep_service.ports import Turn

from .gated import RATIOS, answer_alone, sequence

QUESTION = [7, 8, 9, 10, 11]


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "adds-bos-by-itself"])
def test_field_38_a_bos_stands_only_where_the_template_writes_one(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, *, adds_bos: bool
) -> None:
    backend = tokenizer.backend_tokenizer
    if adds_bos:
        # As Llama's and Mistral's: every text it is given begins with another BOS.
        processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        monkeypatch.setattr(backend, "post_processor", processor)
        assert tokenizer("A text.")["input_ids"][0] == 0
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "<|endoftext|>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}",
    )
    template = ChatTemplate(tokenizer, model="bos")
    ids = [
        *template.prefix_ids(template.frame("Be brief.").prefix),
        *template.document_piece("Rent is due on the first.").ids,
        *template.asked_ids([Turn("user", "Answer in French.\n\nWhen is rent due?")], {}),
    ]
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_field_43_no_query_changes_the_cache_it_reads(
    plain: LanguageModel, contexts: list[BuiltCache]
) -> None:
    for built in contexts:
        before = [_bits(layer) for layer in built.context.layers]
        answers = {
            ratio: [
                answer_alone(
                    plain,
                    sequence(plain, built.context.view(ratio), QUESTION, SequenceOptions(12)),
                )
                for _ in range(3)
            ]
            for ratio in RATIOS
        }
        # No tail was written into it, and no row, start or length moved.
        for layer, expected in zip(built.context.layers, before, strict=True):
            assert all(map(torch.equal, _bits(layer), expected))
        assert all(first == second == third for first, second, third in answers.values())


def _bits(layer: Any) -> tuple[torch.Tensor, ...]:
    return tuple(part.clone() for part in (layer.k, layer.v, layer.start, layer.length))
