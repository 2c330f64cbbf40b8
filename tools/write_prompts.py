"""Writes prompts for the training of heads where no data set is at hand: a chat model makes them up itself.

    python tools/write_prompts.py --target FOLDER --count 3000 --output prompts.jsonl
    hf-specdec train eagle3 FOLDER prompts.jsonl -o head --self-generate 3000 ...

Xu et al. 2024, "Magpie" (arXiv:2406.08464): after the beginning of a user's turn in its own template, the model
writes what a user would ask. The first words are given here, one opening after the other, so that the kinds of tasks
are even.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import cycle, islice

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


OPENINGS = (
    *("", "How do I", "How can I", "What is the difference between", "Why do", "Can you explain", "Explain"),
    *("Give me some tips for", "What should I", "Describe", "What are the", "Is it", "Who was", "Tell me about"),
    *("Write a short story about", "Write a poem about", "Tell a story in which", "Write a letter to"),
    *("Write a Python function that", "Write a class", "Write a SQL query", "Fix this code:\n```python\n"),
    *("List five", "Make a table of", "Write a JSON object with", "Give me a step-by-step", "Make a list of"),
    *("Summarize", "Rewrite the following sentence", "Translate", "Compare", "I have", "I want to", "My friend"),
)

# Place of a user's turn in the template.
_PLACE = "\0"


def write_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    batch_size: int,
    max_new_tokens: int,
    top_k: int | None = None,
) -> list[str]:
    """Returns up to `count` different messages of a user; those that did not end in time are left out."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": _PLACE}], tokenize=False)
    before, _, after = chat.partition(_PLACE)
    end = tokenizer.encode(after, add_special_tokens=False)[0]
    tokenizer.padding_side = "left"
    likely = {"top_p": 0.95} if top_k is None else {"top_k": top_k}
    openings: Iterator[str] = cycle(OPENINGS)
    prompts: dict[str, None] = {}  # in their order, each once
    while len(prompts) < count:
        begun = list(islice(openings, batch_size))
        given = tokenizer(
            [before + text for text in begun], return_tensors="pt", padding=True, add_special_tokens=False
        )
        output = model.generate(
            **given.to(model.device),
            do_sample=True,
            temperature=1.0,
            **likely,
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=end,
        )
        for opening, written in zip(begun, output[:, given["input_ids"].shape[1] :]):
            text = (opening + tokenizer.decode(written, skip_special_tokens=True)).strip()
            if end in written and len(text.split()) > 2:
                prompts[text] = None
        sys.stderr.write(f"{len(prompts)} of {count}\n")
    return list(prompts)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="Folder or id of a chat model.")
    parser.add_argument("--count", type=int, required=True, help="Prompts to write.")
    parser.add_argument("--output", required=True, help="File of one chat a line.")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="Longer prompts are left out.")
    parser.add_argument("--top-k", type=int, help="Draw from so many tokens, not from a share of 0.95: no sorting.")
    parser.add_argument("--dtype", default="float32", help="Data type of the model.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    limits = arguments.count, arguments.batch_size, arguments.max_new_tokens, arguments.top_k
    prompts = write_prompts(model, tokenizer, *limits)
    with open(arguments.output, "w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
