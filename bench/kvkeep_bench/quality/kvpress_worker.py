"""Run by another Python, one that has kvpress 0.5: answers what comes in, a JSON line each.

    PYTHON kvpress_worker.py MODEL_DIRECTORY

The prefill and the answering are kvpress's own pipeline, given token ids instead of texts.
"""

import json
import logging
import sys

import torch
from kvpress import KVzipPress, pipeline
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    logging.disable(logging.WARNING)
    directory = sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pipe = pipeline.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            answers = pipe._forward(
                {
                    "context_ids": torch.tensor([asked["document"]]),
                    "questions_ids": [torch.tensor([ids]) for ids in asked["questions"]],
                },
                max_new_tokens=max(asked["max_tokens"]),
                press=KVzipPress(compression_ratio=asked["removed"]),
            )
            print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
