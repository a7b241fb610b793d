"""Tiny random models with a character tokenizer, saved as real model directories."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHARACTERS = "".join(chr(c) for c in range(32, 127)) + "\n"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = len(CHARACTERS) + 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; <|im_end|> is both end-of-sequence and padding."""
    vocabulary = {TEXT_END: 0, START: 1, END: 2, "<unk>": 3}
    vocabulary.update({character: i + 4 for i, character in enumerate(CHARACTERS)})
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(t, special=True) for t in (TEXT_END, START, END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def llama_config(**changes: int) -> LlamaConfig:
    """Two layers, hidden 32, grouped-query attention, tied embeddings."""
    return LlamaConfig(**{**_COMMON, "tie_word_embeddings": True, **changes})


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def architectures() -> dict[str, PreTrainedConfig]:
    """Configurations of two-layer models that differ in what a layout may get wrong."""
    small = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "llama": llama_config(),
        "qwen3": Qwen3Config(**_COMMON),
        "gpt2": GPT2Config(**small, n_embd=32, n_layer=2, n_head=4, n_positions=512),
        "mistral_sliding": MistralConfig(**_COMMON, sliding_window=8),
        "gemma3": Gemma3TextConfig(**_COMMON, sliding_window=8, query_pre_attn_scalar=8),
        "bloom": BloomConfig(**small, hidden_size=32, n_layer=2, n_head=4),
    }


def make_model(
    config: PreTrainedConfig | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.2,
) -> PreTrainedModel:
    """A model whose weights are normal with standard deviation `spread`, drawn from `seed`."""
    model = AutoModelForCausalLM.from_config(config or llama_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, spread, generator=generator)
    model.generation_config.eos_token_id = [2, 0]
    model.generation_config.pad_token_id = 2
    return model.to(dtype).eval()


def save_tiny(folder: Path, *, seed: int = 0, config: PreTrainedConfig | None = None) -> Path:
    """A model directory as a hub would give it: safetensors, tokenizer, template, two EOS ids."""
    make_model(config, seed=seed).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
