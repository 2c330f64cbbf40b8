"""Makes a draft model of some of a model's own layers, as a beginning for distillation.

    python tools/cut_layers.py --target FOLDER --layers 0,1,2,28,29 --output cut
    hf-specdec train draft_model FOLDER prompts.jsonl -o draft --draft-model cut --self-generate 3000 ...

Embedding, norm and lm_head are copied, and so is the tokenizer.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec.target_facts import decoder_layers


def cut_layers(model: PreTrainedModel, kept: list[int]) -> None:
    """Leaves only some of a model's layers in it; it can be saved, and generates when it has been loaded again."""
    layers = decoder_layers(model)
    model.get_decoder().layers = nn.ModuleList(layers[index] for index in kept)
    config = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="Folder or id of the model.")
    parser.add_argument("--layers", required=True, help="Layers to keep, the first one being 0, separated by commas.")
    parser.add_argument("--output", required=True, help="Folder for the draft model.")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    cut_layers(model, [int(index) for index in arguments.layers.split(",")])
    model.save_pretrained(arguments.output)
    AutoTokenizer.from_pretrained(arguments.target).save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
