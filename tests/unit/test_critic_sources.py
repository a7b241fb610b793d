"""A critic from another model than the policy: what is loaded, what fits, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.critics import body, kept, made, recipe, reward_model, values
from support.tiny import VOCABULARY, architectures, llama_config, make_model, make_tokenizer
from transformers import BertConfig, BertModel, GPT2Config

from surefoot.errors import ModelError, RecipeError
from surefoot.learner.critic import ValueModel
from surefoot.learner.layouts import NAMES, Bundle, build


@pytest.mark.parametrize("kind", ["causal", "base", "reward"])
def test_a_backbone_from_a_directory(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """The directory's own weights, with a head of zeros whatever head lies in the file."""
    source = reward_model() if kind == "reward" else make_model(seed=5)
    saved = source.base_model if kind == "base" else source
    folder = kept(saved, tmp_path / "critic")
    critic = made(recipe(tiny_model, critic={"path": str(folder)}))
    theirs = dict(source.base_model.named_parameters())
    mine = body(critic)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert all(p.requires_grad for p in mine.values())
    assert isinstance(critic.model, ValueModel) and not critic.model.model.training
    assert values(critic) == [0.0] * 5
    assert critic.layouts == NAMES


def test_a_path_starts_at_the_recipes_folder(tiny_model: Path, tmp_path: Path) -> None:
    kept(make_model(seed=5), tmp_path / "critic")
    asked = replace(recipe(tiny_model, critic={"path": "critic"}), base_dir=tmp_path)
    weight = dict(make_model(seed=5).base_model.named_parameters())["layers.0.mlp.up_proj.weight"]
    assert torch.equal(body(made(asked))["layers.0.mlp.up_proj.weight"], weight)


def test_it_takes_the_policys_dtype_and_is_cut_to_its_layers(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = kept(make_model(seed=5), tmp_path / "critic")
    asked = recipe(
        tiny_model,
        model={"path": str(tiny_model), "dtype": "float64"},
        critic={"path": str(folder)},
    )
    assert {p.dtype for p in made(asked).model.parameters()} == {torch.float64}
    critic = made(recipe(tiny_model, critic={"path": str(folder), "layers": 1}))
    layers = {name.split(".")[1] for name in body(critic) if name.startswith("layers.")}
    assert layers == {"0"}
    with pytest.raises(ModelError, match=r"critic\.layers: 3, but the model has 2"):
        made(recipe(tiny_model, critic={"path": str(folder), "layers": 3}))


@pytest.mark.parametrize("wide", [32, 48])
def test_another_architecture_gives_its_own_values(
    wide: int, tiny_model: Path, tmp_path: Path
) -> None:
    """In every layout those of the model alone, also where it is wider than the policy."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=wide, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    )
    source = make_model(config, seed=6)
    critic = made(recipe(tiny_model, critic={"path": str(kept(source, tmp_path / "critic"))}))
    head = critic.model.head
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    assert critic.layouts == NAMES
    prompt, ids = (5, 6, 7), (8, 9, 10, 11)
    with torch.no_grad():
        states = source.base_model(input_ids=torch.tensor([[*prompt, *ids]])).last_hidden_state[0]
        want_T = head(states[2:-1])[:, 0]
        for layout in NAMES:
            part = build(layout, [Bundle(prompt, (ids,), (0,))])
            got_T = critic.model(part)[part.columns_N.argsort()]
            assert torch.allclose(got_T, want_T, atol=1e-5)


def test_layouts_that_are_wrong_for_it_are_off(tiny_model: Path, tmp_path: Path) -> None:
    source = make_model(architectures()["mistral_sliding"], seed=6)
    critic = made(recipe(tiny_model, critic={"path": str(kept(source, tmp_path / "critic"))}))
    assert critic.layouts == ("prefix", "rows")


def test_a_model_that_looks_ahead_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    folder = kept(BertModel(config), tmp_path / "critic")
    with pytest.raises(ModelError, match=r"critic\.path: .*BertModel depend on tokens that come"):
        made(recipe(tiny_model, critic={"path": str(folder)}))


def test_another_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = kept(reward_model(), tmp_path / "critic")
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    words = told["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        made(recipe(tiny_model, critic={"path": str(folder)}))
    said = str(caught.value)
    # "a" is the 65th character after the blank, and four control tokens come first.
    assert f"critic.path: {folder} has another tokenizer than model.path {tiny_model}" in said
    assert "id 69 is 'b' there and 'a' here" in said and "leave critic.path out" in said


def test_a_tokenizer_with_less_is_refused_and_one_with_more_is_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Reward models often bring a padding token of their own."""
    source = reward_model()
    source.resize_token_embeddings(VOCABULARY + 1)
    folder = tmp_path / "more"
    source.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<pad>"])
    tokenizer.save_pretrained(folder)
    assert values(made(recipe(tiny_model, critic={"path": str(folder)}))) == [0.0] * 5
    with pytest.raises(ModelError, match=r"id 100 is no token there and '<pad>' here"):
        causal = make_model()
        causal.resize_token_embeddings(VOCABULARY + 1)
        causal.save_pretrained(tmp_path / "policy")
        tokenizer.save_pretrained(tmp_path / "policy")
        other = kept(reward_model(), tmp_path / "less")
        made(recipe(tmp_path / "policy", critic={"path": str(other)}))


def test_a_directory_without_a_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    reward_model().save_pretrained(tmp_path / "critic")
    with pytest.raises(ModelError, match=r"critic\.path: .* holds no tokenizer"):
        made(recipe(tiny_model, critic={"path": str(tmp_path / "critic")}))


def test_ids_that_it_has_no_embedding_for_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    source = reward_model()
    source.resize_token_embeddings(VOCABULARY - 2)
    folder = kept(source, tmp_path / "critic")
    with pytest.raises(ModelError, match=r"has 98 embedding rows.*ids up to 99.*embeddings\(100\)"):
        made(recipe(tiny_model, critic={"path": str(folder)}))


def test_a_context_that_is_too_short_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """The policy's is 512; with prompts of 40 and completions of 8 a context of 64 will do."""
    source = make_model(llama_config(max_position_embeddings=64), seed=5)
    critic = {"path": str(kept(source, tmp_path / "critic"))}
    with pytest.raises(
        ModelError, match=r"attends over 64 tokens.* may have 512; .* to 56 or less"
    ):
        made(recipe(tiny_model, critic=critic))
    data = {"source": "addition", "max_operand": 9, "max_prompt_tokens": 40}
    assert values(made(recipe(tiny_model, critic=critic, data=data))) == [0.0] * 5


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("pickled", r"critic\.path: .* only pickled weights \(pytorch_model\.bin\)"),
        ("weights", r"critic\.path: the files of .*layers\.2\..* is the first"),
        ("config", r"critic\.path: .* holds no config\.json"),
        ("all", r"critic\.path: there is no directory"),
    ],
)
def test_files_that_are_not_whole_are_refused(
    damage: str, said: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = kept(make_model(seed=5), tmp_path / "critic")
    config = llama_config(num_hidden_layers=3)
    if damage == "pickled":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif damage == "weights":
        config.save_pretrained(folder)
    elif damage == "config":
        (folder / "config.json").unlink()
    else:
        shutil.rmtree(folder)
    with pytest.raises(ModelError, match=said):
        made(recipe(tiny_model, critic={"path": str(folder)}))


@pytest.mark.parametrize("other", [{"path": "m"}, {"layers": 1}, {"init": "run"}])
def test_a_shared_trunk_leaves_nothing_to_load_or_cut(other: dict[str, Any]) -> None:
    (name,) = other
    with pytest.raises(RecipeError, match=rf"critic\.{name}: share_trunk .* leave it out"):
        recipe(Path("m"), critic={"share_trunk": True, **other})
