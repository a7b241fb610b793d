"""Small Llamas that read characters, made here: no hub, no download.

Owns their tokenizer, their weights before any training, and the shape that the alias
`characters-1m` stands for. Refuses to own where they are kept; that is `alias.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"
UNKNOWN = "<unknown>"
PRINTABLE = "".join(chr(code) for code in range(32, 127)) + "\n"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; weights are normal with standard deviation `spread`."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    context: int = 64
    spread: float = 0.05


STUDY = Shape(layers=3, hidden=192, heads=6, context=512)


def make_tokenizer(characters: str, *, unknown: bool = False) -> PreTrainedTokenizerFast:
    """Token 0 ends a text and pads; the characters follow in order, then perhaps `<unknown>`.

    Without it a text with another character is an error.
    """
    vocabulary = {END: 0} | {character: i for i, character in enumerate(characters, 1)}
    assert len(vocabulary) == len(characters) + 1, "a character twice"
    special = [AddedToken(END, special=True)]
    if unknown:
        vocabulary[UNKNOWN] = len(vocabulary)
        special.append(AddedToken(UNKNOWN, special=True))
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN if unknown else None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)
    if unknown:
        tokenizer.unk_token = UNKNOWN
    return tokenizer


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


def save(folder: Path, *, characters: str, seed: int, shape: Shape, unknown: bool = False) -> Path:
    """A model directory as `model.path` takes it: safetensors and a tokenizer."""
    tokenizer = make_tokenizer(characters, unknown=unknown)
    make_model(len(tokenizer), seed=seed, shape=shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_study(folder: Path) -> Path:
    """The untrained model behind `characters-1m`."""
    return save(folder, characters=PRINTABLE, seed=0, shape=STUDY, unknown=True)
