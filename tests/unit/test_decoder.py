"""The one-token decoder against the model's own forward pass, and which models get one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.tiny import architectures, llama_config, make_model, make_tokenizer
from torch import Tensor, nn
from transformers import MistralConfig, PreTrainedModel, Qwen2Config

from surefoot.records import Prompt
from surefoot.rollout import LocalEngine, Sampling
from surefoot.rollout.cache import cache_argument, new_cache
from surefoot.rollout.decoder import TokenDecoder, find_decoder

SIZES = {
    name: value
    for name, value in llama_config().to_dict().items()
    if name.startswith(("vocab", "hidden_s", "inter", "num_", "head_d", "max_pos"))
}
SHAPED = {
    "llama": llama_config(),
    "llama, a key for every query": llama_config(num_key_value_heads=4),
    "llama with biases": llama_config(attention_bias=True, mlp_bias=True),
    "llama, wide heads": llama_config(head_dim=16),
    "mistral without a window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": architectures()["qwen3"],
}
OTHERS = {name: config for name, config in architectures().items() if name not in SHAPED}


def model_of(name: str) -> PreTrainedModel:
    """In float64 (but the norms of transformers are float32), with no norm 1 and no bias 0."""
    model = make_model(SHAPED[name], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def needed(decoder: TokenDecoder | None) -> TokenDecoder:
    assert decoder is not None
    return decoder


@torch.no_grad()
def apart(decoder: TokenDecoder, model: PreTrainedModel, *, padded: bool) -> float:
    """Largest difference of three tokens after a prompt of six, one row padded by two."""
    ids = torch.arange(2 * 9).reshape(2, 9) * 7 % 90 + 3
    visible = torch.ones(2, 9, dtype=torch.bool)
    if padded:
        visible[1, :2] = False
    positions = (visible.long().cumsum(1) - 1).clamp_min(0)
    whole = model.base_model(
        input_ids=ids, position_ids=positions, attention_mask=visible.long()
    ).last_hidden_state
    cache = new_cache(model.config.num_hidden_layers)
    model.base_model(
        input_ids=ids[:, :6],
        position_ids=positions[:, :6],
        attention_mask=visible[:, :6].long(),
        use_cache=True,
        **{cache_argument(model): cache},
    )
    worst = 0.0
    for t in range(6, 9):
        seen = visible[:, : t + 1] if padded else None
        hidden = decoder.step(ids[:, t], positions[:, t], cache, seen)
        worst = max(worst, float((hidden - whole[:, t]).abs().max()))
    return worst


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("name", SHAPED)
def test_a_token_is_read_as_the_model_reads_it(name: str, join: bool, padded: bool) -> None:
    model = model_of(name)
    own = copy.deepcopy(model)
    decoder = needed(find_decoder(own, join=join))
    assert apart(decoder, model, padded=padded) < 1e-5


@pytest.mark.parametrize("name", SHAPED)
def test_joined_weights_are_still_the_models(name: str) -> None:
    """Their values, their names, and what is later copied into them."""
    model, own = model_of(name), model_of(name)
    decoder = needed(find_decoder(own, join=True))
    for ours, theirs in zip(own.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        for ours, theirs in zip(own.parameters(), model.parameters(), strict=True):
            theirs.mul_(1.25).add_(0.01)
            ours.copy_(theirs)
    assert apart(decoder, model, padded=True) < 1e-5


@pytest.mark.parametrize("name", SHAPED)
def test_packed_weights_give_what_plain_ones_give(name: str) -> None:
    """In bfloat16, against plain products of the same numbers: apart by its rounding alone."""
    model = model_of(name).to(torch.bfloat16)
    packed = needed(find_decoder(model, join=False))
    assert packed.head.packed is not None
    plain = TokenDecoder(model, join=False, pack=False)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for mine, theirs in zip(packed.blocks, plain.blocks, strict=True):
        for part in ("queries_keys_values", "gate_up"):
            got, want = getattr(mine, part)(hidden), getattr(theirs, part)(hidden)
            assert torch.allclose(got.double(), want.double(), rtol=2**-6, atol=2**-6)
    got, want = packed.logits(hidden), plain.logits(hidden)
    assert torch.allclose(got.double(), want.double(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_have_none(name: str) -> None:
    assert find_decoder(make_model(OTHERS[name]), join=False) is None


class Adapted(nn.Module):
    """A linear layer with something added, as an adapter has it; it shows the layer's weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x.sum(-1, keepdim=True)


class Quantised(nn.Linear):
    pass


@pytest.mark.parametrize("join", [False, True])
def test_a_layer_of_another_class_has_none(join: bool) -> None:
    for kind in (Adapted, lambda base: Quantised(base.in_features, base.out_features)):
        model: Any = make_model()
        attention = model.base_model.layers[1].self_attn
        attention.v_proj = kind(attention.v_proj)
        assert find_decoder(model, join=join) is None


def test_a_model_with_a_hook_has_none() -> None:
    model: Any = make_model()
    model.base_model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert find_decoder(model, join=False) is None


def test_a_model_that_does_something_else_has_none() -> None:
    """Structure and names of a Llama, but its feed-forward part is scaled."""
    model: Any = make_model()
    for layer in model.base_model.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x, forward=forward: 1.1 * forward(x)
    assert find_decoder(model, join=False) is None


def engine(model: PreTrainedModel, dtype: torch.dtype) -> LocalEngine:
    return LocalEngine(
        model,
        make_tokenizer(),
        settings=Sampling(temperature=1.0, max_new_tokens=8),
        stop_ids=(2,),
        dtype=dtype,
        rows=5,
        seed=0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_decodes_with_it_and_leaves_the_policy_alone(dtype: torch.dtype) -> None:
    model = make_model()
    weights = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    tool = engine(model, dtype)
    assert tool.decoder is not None
    prompts = [Prompt(str(i), i, (5, 6 + i, 7)[: 2 + i % 2], "text") for i in range(4)]
    fast = tool.sample(prompts, 3, purpose="rollout")
    tool.decoder = None
    slow = tool.sample(prompts, 3, purpose="rollout")
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr(), True) == (
            weights[name][0],
            torch.equal(parameter, weights[name][1]),
        )
    if dtype is torch.float32:
        assert [c.ids for g in fast for c in g.completions] == [
            c.ids for g in slow for c in g.completions
        ]


def test_a_copy_in_another_precision_keeps_its_buffers() -> None:
    """Rotary frequencies rounded to bfloat16 would turn late positions by another angle."""
    model: Any = make_model()
    own: Any = engine(model, torch.bfloat16).model
    assert {p.dtype for p in own.parameters()} == {torch.bfloat16}
    assert torch.equal(own.base_model.rotary_emb.inv_freq, model.base_model.rotary_emb.inv_freq)
    assert own.base_model.rotary_emb.inv_freq.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_reach_it(dtype: torch.dtype) -> None:
    """A policy that changed, and an engine with a copy in another precision, or with the policy's
    own weights; both keep packed ones."""
    model = make_model(seed=1, dtype=dtype)
    tool = engine(model, torch.bfloat16)
    assert tool.decoder is not None and tool.decoder.head.packed is not None
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), make_model(seed=2).parameters(), strict=True):
            parameter.copy_(new)
    tool.load(model, version=1)
    prompts = [Prompt("p", 0, (5, 6, 7), "text")]
    fresh = engine(model, torch.bfloat16)
    got, want = (e.sample(prompts, 4, purpose="rollout")[0] for e in (tool, fresh))
    assert [c.ids for c in got.completions] == [c.ids for c in want.completions]
    assert [c.logps for c in got.completions] == [c.logps for c in want.completions]
