"""Negative ids among the tokens, which stand beside embeddings for what is no text."""

import pytest
import torch

from tests.helpers.models import prompts, tiny_llama


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycling", "ngram+recycling", "suffix+recycling"])
@pytest.mark.parametrize("places", [slice(2, 5), slice(0, 3), slice(6, 9)], ids=["middle", "beginning", "end"])
def test_placeholders_beside_embeddings(method, places):
    model, inputs = tiny_llama(), prompts(2, length=9)
    ids = inputs["input_ids"].clone()
    # The text before them comes again.
    ids[:, 7:] = ids[:, :2]
    arguments = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": inputs["attention_mask"]}
    ids[:, places] = -200
    arguments |= {"do_sample": False, "max_new_tokens": 12}
    plain = model.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, **arguments, spec_method=method), plain)
