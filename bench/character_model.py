"""A small Llama with random weights that reads characters, saved as a model directory.

    python bench/character_model.py FOLDER --characters 0123456789= --seed 0

Nothing is downloaded. One token is one character; the end of a text is a token of its own, which
pads too. There is no chat template: set model.template to none.

Owns the model and its tokenizer. Refuses to own tasks (copy_task.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; weights are normal with standard deviation `spread`."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    context: int = 64
    spread: float = 0.05


def make_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Token 0 ends a text; the characters follow in order."""
    vocabulary = {END: 0} | {character: i for i, character in enumerate(characters, 1)}
    assert len(vocabulary) == len(characters) + 1, "a character twice"
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)


def make_model(vocabulary: int, *, seed: int, shape: Shape) -> LlamaForCausalLM:
    """The same weights for the same arguments, whatever else the process has drawn."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms have one dimension, and stay 1.
            if parameter.ndim > 1:
                parameter.normal_(0.0, shape.spread, generator=generator)
    return model


def save(folder: Path, *, characters: str, seed: int, shape: Shape) -> Path:
    """A model directory as `model.path` takes it: safetensors and a tokenizer."""
    tokenizer = make_tokenizer(characters)
    make_model(len(tokenizer), seed=seed, shape=shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--characters", default="0123456789=")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    options = parser.parse_args()
    shape = Shape(layers=options.layers, hidden=options.hidden)
    save(options.folder, characters=options.characters, seed=options.seed, shape=shape)


if __name__ == "__main__":
    main()
