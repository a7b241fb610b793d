"""An exported directory: its card, and that nothing appears which is read otherwise."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from support.tiny import llama_config, make_model, make_tokenizer
from transformers import GenerationConfig, PreTrainedModel

import surefoot
from surefoot.errors import ModelError
from surefoot.loops.runs import export
from surefoot.models import adapter, save_directory, wrap_model
from surefoot.models import export as files
from surefoot.models.card import Card, render
from surefoot.models.template import PromptTemplate
from surefoot.models.verify import Asked, same_tokens, turn

ROWS = [{"prompt": f"say {c}", "answer": c} for c in "abcdefgh"]


def letters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float("a" in text) for text in completions]


def trained(run: Path, model: Path, **section: Any) -> Path:
    return surefoot.train(
        {
            "model": {"path": str(model), **section},
            "method": {"name": "rloo", "group_size": 4, "kl": "none"},
            "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
            "optim": {"learning_rate": 0.01},
            "run": {
                "dir": str(run),
                "steps": 2,
                "eval_every": 1,
                "checkpoint_every": 1,
                "seed": 5,
                "trackers": [],
            },
        },
        rewards=[letters],
        data=ROWS,
        eval_data=[{"prompt": "shout x", "answer": "x"}],
    ).path


@pytest.fixture(scope="module")
def full(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("card") / "full", tiny_model)


@pytest.fixture(scope="module")
def thin(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("card") / "thin", tiny_model, lora={"rank": 2})


# The card.


def facts_of(card: str) -> dict[str, str]:
    cells = [line.strip("| ").split(" | ") for line in card.splitlines() if line[:2] == "| "]
    return {cell[0]: cell[1] for cell in cells if len(cell) == 2}


def test_the_card_says_what_the_run_says(full: Path, tiny_model: Path, tmp_path: Path) -> None:
    text = (export(full, tmp_path / "model") / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header == {"library_name": "transformers", "tags": ["surefoot"]}
    facts = facts_of(text)
    assert facts["base model"] == f"`{tiny_model}`"
    assert facts["method"] == "rloo"
    assert "| data | `rows` |\n| data | `rows`, evaluation alone |" in text
    assert facts["step"] == "2 of 2" and facts["seed"] == "5"
    assert f"surefoot {surefoot.__version__}" in facts["trained with"]
    assert "3 prompts, " in facts["verified"] and "equal in transformers" in facts["verified"]
    last = surefoot.Run.open(full).metrics[-1]
    assert f"at step {last['step']} on" in text
    assert float(facts["`eval/accuracy`"]) == pytest.approx(last["eval/accuracy"], rel=1e-5)
    assert "adapter" not in text and "AutoModelForCausalLM.from_pretrained(PATH)" in text


def test_an_earlier_checkpoint_has_the_evaluation_of_its_own_step(
    full: Path, tmp_path: Path
) -> None:
    text = (export(full, tmp_path / "model", 1) / "README.md").read_text()
    facts = facts_of(text)
    assert facts["step"] == "1 of 2" and "at step 1 on" in text
    own = surefoot.Run.open(full).metrics[-2]
    assert own["step"] == 1
    assert float(facts["`eval/accuracy`"]) == pytest.approx(own["eval/accuracy"], rel=1e-5)


def test_the_card_of_an_adapter_names_peft(thin: Path, tmp_path: Path) -> None:
    text = (export(thin, tmp_path / "adapter") / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "peft"
    facts = facts_of(text)
    assert facts["adapter"] == "LoRA, rank 2, alpha 32"
    assert "peft" in facts["trained with"] and "equal in peft" in facts["verified"]
    assert "PeftModel.from_pretrained" in text
    merged = (export(thin, tmp_path / "merged", merge=True) / "README.md").read_text()
    assert facts_of(merged)["adapter"] == "LoRA, rank 2, alpha 32, merged"


def test_a_hub_id_is_in_the_header_and_cells_are_kept_whole() -> None:
    card = Card(
        name="mine",
        kind="model",
        base="org/base at v1",
        hub_id="org/base",
        method="a|b",
        adapter=None,
        data=["`one`", "`two`, split test"],
        step=1200,
        steps=None,
        seed=0,
        evaluation={},
        evaluated=None,
        versions={"torch": "2.9"},
        verified="nothing",
    )
    text = render(card)
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "org/base"
    assert "| method | a\\|b |" in text and "| step | 1,200 |" in text
    assert "| data | `one` |\n| data | `two`, split test |" in text
    assert "Evaluated" not in text


# Verification.


def spoiled(write: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A writer whose weights on disk are others than those in memory."""

    def written(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        folder = next(each for each in arguments if isinstance(each, Path))
        weights = safetensors.torch.load_file(folder / name)
        mixed = {key: value.flip(0) * 3 for key, value in weights.items()}
        safetensors.torch.save_file(mixed, folder / name, metadata={"format": "pt"})

    return written


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_directory_that_says_otherwise_leaves_nothing_behind(
    kind: str, full: Path, thin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "full":
        monkeypatch.setattr(files, "_save", spoiled(files._save, "model.safetensors"))
    else:
        monkeypatch.setattr(adapter, "write", spoiled(adapter.write, adapter.WEIGHTS))
    with pytest.raises(ModelError, match=r"export: the directory, loaded by plain transformers"):
        export(full if kind == "full" else thin, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Disks that refuse.


def save_kind(kind: str, destination: Path) -> None:
    model, tokenizer = make_model(), make_tokenizer()
    if kind == "object":
        template = PromptTemplate(tokenizer, template="auto", max_context=512)
        save_directory(wrap_model(model, template, source="tiny"), destination)
    elif kind == "model":
        files.save_whole(model, tokenizer, destination)
    else:
        with files.appearing(destination) as folder:
            tokenizer.save_pretrained(folder)


@pytest.mark.fault(5)
@pytest.mark.parametrize("kind", ["object", "model", "tokenizer"])
def test_a_disk_that_fills_below_an_export_is_named(kind: str, tmp_path: Path) -> None:
    """The weights are refused in safetensors' words, the tokenizer in those of tokenizers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("this machine limits file sizes itself")
    words = r"'.*/out' cannot be written \(File too large\); name another directory, or make room"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ModelError, match=words):
            save_kind(kind, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    save_kind(kind, tmp_path / "out")


@pytest.mark.fault(5)
def test_a_full_disk_below_the_card_is_named(tmp_path: Path) -> None:
    def finish(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "README.md"))

    with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\)"):
        files.save_whole(make_model(), make_tokenizer(), tmp_path / "out", finish=finish)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError("no file named model.safetensors in directory out"),
        OSError(errno.ENOENT, os.strerror(errno.ENOENT), "tokenizer.json"),
        ModelError("export: the directory says (os error 28)"),
        RuntimeError("mismatch"),
    ],
)
def test_what_no_disk_said_is_not_called_a_disk_that_refuses(
    error: Exception, tmp_path: Path
) -> None:
    with pytest.raises(type(error)) as caught, files.appearing(tmp_path / "out"):
        raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_made_or_taken_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep")
    with pytest.raises(ModelError, match=r"cannot be written .*(Not a directory|File exists)"):
        save_kind("model", tmp_path / "file" / "out")
    with (
        pytest.raises(ModelError, match=r"cannot be written .*Not a directory"),
        files.appearing(tmp_path / "late") as folder,
    ):
        (folder / "config.json").write_text("{}")
        (tmp_path / "late").write_text("another process was here")
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "late"}


def asked(folder: Path, model: PreTrainedModel, answer: list[int]) -> str:
    """Save a tiny model and verify it against an answer to one question."""
    tokenizer = make_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[0, 2])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    template = PromptTemplate(tokenizer, template="auto", max_context=512)
    loaded = wrap_model(model, template, source="tiny")
    question = Asked("ab", template.encode(turn("ab")), tuple(answer))
    return same_tokens(folder, loaded, [question], below=None, remote_code=False)


def test_equal_tokens_pass_and_one_other_token_does_not(tmp_path: Path) -> None:
    model = make_model()
    template = PromptTemplate(make_tokenizer(), template="auto", max_context=512)
    ids = torch.tensor([template.encode(turn("ab"))])
    answer: list[int] = []
    for _ in range(6):
        seen = torch.cat([ids, torch.tensor([answer], dtype=torch.long)], 1)
        with torch.no_grad():
            answer.append(int(model(input_ids=seen).logits[0, -1].argmax()))
    assert 0 not in answer and 2 not in answer, "no stop in what is compared"
    assert "1 prompts, 6 greedy tokens, equal in" in asked(tmp_path / "same", model, answer)
    other = [*answer[:4], (answer[4] + 1) % 90 + 4, answer[5]]
    with pytest.raises(ModelError, match=r"answers 'ab' with other tokens from token 5 on"):
        asked(tmp_path / "other", model, other)


def test_a_tie_is_told_and_not_refused(tmp_path: Path) -> None:
    """With an output layer of zeros every token is as likely as any other."""
    model = make_model(llama_config(tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    said = asked(tmp_path / "flat", model, [9, 9])
    assert "0 greedy tokens" in said and "1 of the answers up to a tie" in said


def test_other_prompt_ids_and_other_stops_are_refused(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(ModelError, match="reads the prompt 'ab' as other token ids"):
        folder = tmp_path / "ids"
        model.save_pretrained(folder)
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder)
        template = PromptTemplate(tokenizer, template="auto", max_context=512)
        loaded = wrap_model(model, template, source="tiny")
        question = Asked("ab", template.encode(turn("abc")), (9,))
        same_tokens(folder, loaded, [question], below=None, remote_code=False)
    wrapped = make_model()
    wrapped.generation_config = GenerationConfig(eos_token_id=[2])
    wrapped.save_pretrained(tmp_path / "ends")
    make_tokenizer().save_pretrained(tmp_path / "ends")
    template = PromptTemplate(make_tokenizer(), template="auto", max_context=512)
    loaded = wrap_model(make_model(), template, source="tiny")
    question = Asked("ab", template.encode(turn("ab")), (9,))
    with pytest.raises(ModelError, match=r"ends at the ids \[2\] instead of \[0, 2\]"):
        same_tokens(tmp_path / "ends", loaded, [question], below=None, remote_code=False)
