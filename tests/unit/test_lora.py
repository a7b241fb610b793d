"""LoRA: where adapters lie, what they start from, the reference, the engine, and given ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.engines import PROMPTS, make_engine
from support.steps import batch_of, make_learner
from support.tiny import architectures, llama_config, make_model
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.learner.batch import make_batch
from surefoot.learner.layouts import NAMES, Name
from surefoot.methods import online_rows
from surefoot.models.lora import (
    AdapterIdentity,
    StartingAdapter,
    adapter_weights,
    add_adapter,
    base_copy,
    described,
    make_trainable,
    merged_copy,
    moving_weights,
    plain_weights,
)
from surefoot.recipe import Lora

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=IDS).logits
    return out


def adapted(model: PreTrainedModel, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    add_adapter(model, Lora(**{"rank": 4, "alpha": 8.0, **settings}), seed=seed, base_dir=None)
    return model


def moved(model: PreTrainedModel, *, spread: float = 0.2) -> PreTrainedModel:
    """As after training: every weight of the adapter is another."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * spread)
    return model


# Where they lie.


def test_every_linear_layer_but_the_head_has_one_and_the_rest_is_frozen() -> None:
    model = adapted(make_model())
    weights = adapter_weights(model)
    homes = {name.split(".lora_")[0] for name in weights}
    block = [f"self_attn.{n}" for n in LINEAR[:4]] + [f"mlp.{n}" for n in LINEAR[4:]]
    assert homes == {f"model.layers.{i}.{name}" for i in (0, 1) for name in block}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(weights)
    # Rank 4 times inputs plus outputs: 32+32, 32+16 twice, 32+32, 32+48 thrice; in two layers.
    assert sum(w.numel() for w in weights.values()) == 4 * (64 + 48 + 48 + 64 + 3 * 80) * 2 == 3712
    (line,) = described(model)
    assert "rank 4 on 14 layers: 3,712 of" in line
    assert described(make_model()) == []


def test_named_targets_alone_are_adapted() -> None:
    model = adapted(make_model(), targets=("q_proj", "layers.1.mlp.down_proj"))
    homes = {
        name.split(".lora_")[0].removeprefix("model.layers.") for name in adapter_weights(model)
    }
    assert homes == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("q_prj", r"model\.lora\.targets:.* no module 'q_prj'; did you mean 'q_proj'"),
        ("zzz", "no module 'zzz'; did you mean 'down_proj' or 'gate_proj' or"),
        ("lm_head", "'lm_head' is no linear layer, or the LM head"),
        ("mlp", "'mlp' is no linear layer"),
        ("embed_tokens", "'embed_tokens' is no linear layer"),
    ],
)
def test_a_target_that_is_none_names_those_that_are(word: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        adapted(make_model(), targets=(word,))


# What they start from.


@pytest.mark.parametrize("architecture", architectures())
def test_a_fresh_adapter_changes_nothing_and_a_trained_one_can_be_merged(
    architecture: str,
) -> None:
    model = make_model(architectures()[architecture], dtype=torch.float64)
    before, base = logits(model), copy.deepcopy(model)
    adapted(model)
    assert torch.equal(logits(model), before)
    moved(model)
    after = logits(model)
    assert float((after - before).norm() / before.norm()) > 1e-2
    merged = merged_copy(model, dtype=torch.float64)
    assert torch.allclose(logits(merged), after, rtol=1e-10, atol=1e-10)
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in base.named_parameters()]
    bare = base_copy(model)
    assert torch.equal(logits(bare), before)
    assert torch.equal(logits(model), after), "the model itself was changed"
    # The plain weights are those of the merged copy; those that move, the ones that differ.
    plain = dict(plain_weights(model))
    assert {n: w.shape for n, w in plain.items()} == {
        n: p.shape for n, p in base.named_parameters()
    }
    changed = {n for n, p in base.named_parameters() if not torch.equal(p, plain[n])}
    assert changed == {name for name, _ in moving_weights(model)}


def test_the_start_is_a_function_of_its_key() -> None:
    one, again = adapted(make_model()), adapted(make_model(seed=1))
    other = adapted(make_model(), seed=1)
    drawn = []
    for name, weight in adapter_weights(one).items():
        assert torch.equal(weight, adapter_weights(again)[name])
        if "lora_B" in name:
            assert not bool(weight.any())
            continue
        assert not torch.equal(weight, adapter_weights(other)[name])
        bound = weight.shape[1] ** -0.5
        assert bool((weight.abs() < bound).all())
        drawn.append(weight.flatten() / bound)
    # Uniform in (-1, 1): mean 0, variance 1/3, over 1,984 draws.
    every = torch.cat(drawn).detach()
    assert float(every.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(every.var()) == pytest.approx(1 / 3, abs=0.03)


def test_a_bfloat16_model_has_a_float32_adapter() -> None:
    model = adapted(make_model(dtype=torch.bfloat16))
    before = logits(model)
    assert before.dtype == model.dtype == torch.bfloat16
    assert {weight.dtype for weight in adapter_weights(model).values()} == {torch.float32}
    start = StartingAdapter(model)
    moved(model)
    with start.in_place():
        assert torch.equal(logits(model), before)


# The reference.


@pytest.mark.parametrize("given", [False, True])
def test_the_start_is_kept_while_the_adapter_moves(given: bool) -> None:
    model = adapted(make_model())
    if given:
        moved(model)
    before = logits(model)
    start = StartingAdapter(model)
    moved(model)
    after = logits(model)
    with start.in_place():
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)
    with pytest.raises(RuntimeError), start.in_place():
        raise RuntimeError("out of memory")
    assert torch.equal(logits(model), after)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(adapter_weights(model))


def test_what_is_trainable_is_what_the_model_has() -> None:
    full, thin = make_model(), adapted(make_model())
    for model in (full, thin):
        model.requires_grad_(False)
        make_trainable(model)
    assert all(p.requires_grad for p in full.parameters())
    assert {n for n, p in thin.named_parameters() if p.requires_grad} == set(adapter_weights(thin))


# The engine.


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_the_engine_samples_from_merged_weights(architecture: str) -> None:
    model = moved(adapted(make_model(architectures()[architecture])), spread=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = make_engine(model)
    for version in (0, 1):
        engine.load(model, version=version)
        groups = engine.sample(PROMPTS, 2, purpose="train")
        learner = make_learner(model, online_rows()["rloo"], temperature=1.0)
        batch = make_batch(groups)
        plan = learner.plan(batch, torch.ones(batch.rows, dtype=torch.bool), step=1)
        facts = learner.score(batch, plan, old=True, reference=False)
        assert facts.old_logp_BT is not None
        gap = (facts.old_logp_BT - batch.sampled_logp_BT)[batch.mask_BT]
        assert float(gap.abs().max()) < 1e-4
        if version == 0:
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            first = [c.ids for group in groups for c in group.completions]
            moved(model, spread=0.3)
    assert [c.ids for group in groups for c in group.completions] != first


@pytest.mark.parametrize("layout", NAMES)
def test_every_layout_takes_an_adapter(layout: Name) -> None:
    """The old log-probabilities are those of the merged model, and its gradient reaches all."""
    model = moved(adapted(make_model(dtype=torch.float64)))
    plain = merged_copy(model, dtype=torch.float64)
    row, batch = online_rows()["rloo"], batch_of([[3, 8, 1], [5, 2, 7]])
    told = []
    for one in (model, plain):
        learner = make_learner(one, row, layouts=(layout,))
        plan = learner.plan(batch, torch.ones(6, dtype=torch.bool), step=1)
        told.append(learner.score(batch, plan, old=True, reference=False).old_logp_BT)
        sum(learner.scorer(part).logp_N.sum() for part in plan.passes).backward()
    assert told[0] is not None and told[1] is not None
    assert torch.allclose(told[0], told[1], rtol=0, atol=1e-10)
    for name, weight in adapter_weights(model).items():
        assert weight.grad is not None and bool(weight.grad.any()), name


# Given ones.


def peft_directory(folder: Path, model: PreTrainedModel, **settings: Any) -> PeftModel:
    """An adapter that PEFT made and saved itself; its B is not zero."""
    config = LoraConfig(
        **{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **settings}
    )
    made = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    made.save_pretrained(folder)
    return made.eval()


def test_a_given_adapter_is_the_one_that_peft_saved(tmp_path: Path) -> None:
    base = make_model()
    theirs = peft_directory(tmp_path / "given", base)
    ours = make_model()
    add_adapter(ours, Lora(path="given"), seed=0, base_dir=tmp_path)
    assert torch.equal(logits(ours), logits(theirs))
    assert not torch.equal(logits(ours), logits(base))
    assert "rank 3 on 4 layers" in described(ours)[0]


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    base = make_model()
    peft_directory(folder, base)

    def refused(match: str, model: PreTrainedModel | None = None, **settings: Any) -> None:
        with pytest.raises(ModelError, match=match):
            add_adapter(
                make_model() if model is None else model,
                Lora(path=str(folder), **settings),
                seed=0,
                base_dir=None,
            )

    refused(r"has rank 3, and model\.lora\.rank is 4; leave the key out", rank=4)
    refused(r"has alpha 6, and model\.lora\.alpha is 8", alpha=8.0)
    refused(r"model\.lora\.targets says up_proj", targets=("up_proj",))
    refused("does not fit GPT2LMHeadModel", make_model(architectures()["gpt2"]))
    wider = make_model(llama_config(intermediate_size=64))
    refused(r"has shape \(3, 48\) instead of \(3, 64\)", wider)
    for change in ({"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}):
        edited(folder, **change)
        refused(f"sets {next(iter(change))} to .*not built")
        edited(folder, use_dora=False, bias="none", modules_to_save=None)
    weights = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80")
    refused("only pickled weights")
    short = dict(list(weights.items())[1:])
    safetensors.torch.save_file(short, folder / "adapter_model.safetensors")
    refused("weight base_model.model.* is in one alone")
    with pytest.raises(ModelError, match=r"no directory nowhere with an adapter_config\.json"):
        add_adapter(make_model(), Lora(path="nowhere"), seed=0, base_dir=tmp_path)


def test_a_given_adapter_beside_something_else_than_a_linear_layer_is_refused(
    tmp_path: Path,
) -> None:
    model = make_model()
    peft_directory(tmp_path / "given", model, target_modules=["embed_tokens"])
    with pytest.raises(ModelError, match="is no linear layer inside the model"):
        add_adapter(make_model(), Lora(path="given"), seed=0, base_dir=tmp_path)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'surefoot\[lora\]'"):
        adapted(make_model())


def test_the_identity_follows_scale_places_and_a_given_start(tmp_path: Path) -> None:
    def told(**settings: Any) -> AdapterIdentity:
        return add_adapter(make_model(), Lora(**settings), seed=0, base_dir=tmp_path)

    peft_directory(tmp_path / "one", make_model())
    peft_directory(tmp_path / "two", make_model(), lora_alpha=5)
    named = [
        {"rank": 4},
        {"rank": 8},
        {"rank": 4, "alpha": 8.0},
        {"rank": 4, "targets": ("q_proj",)},
        {"path": "one"},
        {"path": "two"},
    ]
    assert len({told(**settings) for settings in named}) == len(named)
    assert told(**named[0]) == told(**named[0])
    assert told(path="one") == told(path="one")
    assert told(path="one").places != told(path="two").places
    assert told(**named[0]).start == ""


def test_a_rank_that_no_layer_can_use_is_refused() -> None:
    # Hidden 32, feed-forward 48, vocabulary above: no layer has both sides above 32.
    add_adapter(make_model(), Lora(rank=32), seed=0, base_dir=None)
    for rank in (33, 2**31 - 1):
        with pytest.raises(ModelError, match=rf"model\.lora\.rank: {rank} is more than the 32"):
            add_adapter(make_model(), Lora(rank=rank), seed=0, base_dir=None)
