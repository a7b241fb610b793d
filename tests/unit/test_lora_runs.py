"""LoRA through whole runs: KL at the start, checkpoints, critics, offline methods, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from support.critics import made as made_critic
from support.critics import recipe as critic_recipe
from support.offline import FORMS
from support.runs import assert_same_run
from support.tiny import make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import surefoot
from surefoot.errors import CheckpointError, ModelError
from surefoot.learner.critic import ValueModel
from surefoot.loops.runs import export, saved_recipe
from surefoot.models import load_model
from surefoot.models.lora import adapter_weights
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory

ROWS = [{"prompt": f"say {c}", "answer": c} for c in "abcdefgh"]
LORA = {"rank": 4, "alpha": 8.0}


def capitals(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of capital letters."""
    return [sum(c.isupper() for c in text) / max(1, len(text)) for text in completions]


def online(run: Path, model: Any, *overrides: str, method: Any = None, lora: Any = LORA):
    recipe = {
        "model": {"lora": lora},
        "method": method or {"name": "grpo", "group_size": 4},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
        "optim": {"learning_rate": 0.02},
        "run": {"dir": str(run), "steps": 4, "checkpoint_every": 2, "trackers": []},
    }
    objects = {"tokenizer": make_tokenizer()} if not isinstance(model, str) else {}
    return surefoot.train(recipe, overrides, rewards=[capitals], data=ROWS, model=model, **objects)


def offline(run: Path, model: Path, method: Any, rows: str) -> surefoot.Run:
    return surefoot.train(
        {
            "model": {"path": str(model), "lora": LORA},
            "method": method,
            "optim": {"learning_rate": 0.02, "batch_size": 3},
            "run": {"dir": str(run), "steps": 6, "trackers": []},
        },
        data=FORMS[rows],
    )


def saved(run: Path, part: str) -> dict[str, torch.Tensor]:
    found = load_latest(RunDirectory(run), rename_damaged=False)
    assert found is not None
    return found.tensors(part)


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return online(tmp_path_factory.mktemp("lora") / "run", str(tiny_model)).path


def test_the_kl_starts_at_exactly_zero_and_the_adapter_moves(trained: Path) -> None:
    kl = [row["kl"] for row in surefoot.Run.open(trained).metrics]
    assert kl[0] == 0.0 and kl[-1] > 0.0


def test_a_checkpoint_holds_the_adapter_alone(trained: Path, tiny_model: Path) -> None:
    model = load_model(saved_recipe(RunDirectory(trained), reads_only_model=True))
    names = set(adapter_weights(model.model))
    assert set(saved(trained, "policy")) == names
    moments = saved(trained, "optimizer")
    assert set(moments) == {f"{k}.{n}" for k in ("exp_avg", "exp_avg_sq", "step") for n in names}
    folder = max((trained / "checkpoints").glob("step_*"))
    adapter = (folder / "policy.safetensors").stat().st_size
    assert adapter < 0.4 * (tiny_model / "model.safetensors").stat().st_size


def test_an_interrupted_run_ends_as_one_that_was_not(
    trained: Path, tiny_model: Path, tmp_path: Path
) -> None:
    online(tmp_path / "run", str(tiny_model), "run.steps=2")
    online(tmp_path / "run", str(tiny_model))
    assert_same_run(tmp_path / "run", trained)


def test_another_adapter_is_another_run(tiny_model: Path, tmp_path: Path) -> None:
    run = online(tmp_path / "run", str(tiny_model), "run.steps=2").path
    with pytest.raises(CheckpointError, match="belongs to another run: model was"):
        online(run, str(tiny_model), "run.allow_change=[model.lora]", lora={**LORA, "alpha": 9.0})


def test_an_object_is_trained_in_place_and_its_base_is_kept(tmp_path: Path) -> None:
    model, base = make_model(), make_model()
    run = online(tmp_path / "run", model)
    kept = AutoModelForCausalLM.from_pretrained(run.path / "reference")
    was = dict(base.named_parameters())
    assert {n: p.shape for n, p in kept.named_parameters()} == {n: p.shape for n, p in was.items()}
    assert all(torch.equal(p, was[n]) for n, p in kept.named_parameters())
    mine = adapter_weights(model)
    assert all(torch.equal(mine[n], w) for n, w in saved(run.path, "policy").items())
    more = online(run.path, make_model(), "run.steps=5")
    assert more.metrics[-1]["step"] == 5
    with pytest.raises(ModelError, match="has an adapter"):
        online(run.path, model, "run.steps=6")
    folder = more.export(tmp_path / "adapter")
    over = PeftModel.from_pretrained(make_model(), str(folder))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        # The trained object computes attention by a function of its own.
        assert torch.allclose(
            over(input_ids=ids).logits, more.policy(input_ids=ids).logits, atol=1e-4
        )


def test_a_given_adapter_starts_at_a_kl_of_zero_and_goes_on(
    trained: Path, tiny_model: Path, tmp_path: Path
) -> None:
    given = export(trained, tmp_path / "given")
    run = online(tmp_path / "run", str(tiny_model), lora={"path": str(given)})
    assert run.metrics[0]["kl"] == 0.0 and run.metrics[-1]["kl"] > 0.0
    online(tmp_path / "again", str(tiny_model), "run.steps=2", lora={"path": str(given)})
    online(tmp_path / "again", str(tiny_model), lora={"path": str(given)})
    assert_same_run(tmp_path / "again", run.path)


# Critics.


def critic_of(tiny_model: Path, **sections: Any):
    return made_critic(
        critic_recipe(tiny_model, **{"model": {"path": str(tiny_model), "lora": LORA}, **sections})
    )


def test_a_critic_shares_the_frozen_base_and_trains_its_own_adapter(tiny_model: Path) -> None:
    asked = critic_recipe(tiny_model, model={"path": str(tiny_model), "lora": LORA})
    policy = load_model(asked)
    from surefoot.learner.scorer import Scorer
    from surefoot.loops.critics import make_critic

    scorer = Scorer(policy.model, compute=torch.float32, head_dtype=torch.float32, temperature=1.0)
    critic = make_critic(asked, asked.method, policy, scorer)
    assert isinstance(critic.model, ValueModel)
    own = adapter_weights(critic.model.model)
    trained = {n for n, p in critic.model.named_parameters() if p.requires_grad}
    assert trained == {f"model.{n}" for n in own} | {"head.weight", "head.bias"}
    theirs = dict(policy.model.base_model.named_parameters())
    for name, parameter in critic.model.model.named_parameters():
        shared = parameter.data_ptr() == theirs[name].data_ptr()
        assert shared == (name not in own), name


def test_a_critic_of_another_model_gets_an_adapter_of_its_own(
    tiny_model: Path, tmp_path: Path
) -> None:
    from support.critics import kept

    other = kept(make_model(seed=3), tmp_path / "other")
    critic = critic_of(tiny_model, critic={"path": str(other)})
    assert isinstance(critic.model, ValueModel)
    trained = {n for n, p in critic.model.named_parameters() if p.requires_grad}
    assert trained == {f"model.{n}" for n in adapter_weights(critic.model.model)} | {
        "head.weight",
        "head.bias",
    }


@pytest.mark.parametrize("share", [False, True])
def test_ppo_learns_with_adapters_and_resumes(
    share: bool, tiny_model: Path, tmp_path: Path
) -> None:
    def run(name: str, *overrides: str) -> Path:
        method = {"name": "ppo", "group_size": 2}
        more = [*overrides, f"critic.share_trunk={str(share).lower()}"]
        return online(tmp_path / name, str(tiny_model), *more, method=method).path

    whole = run("whole")
    critic = saved(whole, "critic")
    assert {"head.weight", "head.bias"} <= set(critic)
    others = [name for name in critic if not name.startswith("head.")]
    assert bool(others) != share and all(".lora_" in name for name in others)
    run("cut", "run.steps=2")
    run("cut")
    assert_same_run(tmp_path / "cut", whole)


def test_a_critic_of_an_earlier_run_must_stand_on_the_same_base(
    tiny_model: Path, tmp_path: Path
) -> None:
    method = {"name": "ppo", "group_size": 2}
    first = online(tmp_path / "first", str(tiny_model), "run.steps=2", method=method).path
    again = online(
        tmp_path / "again", str(tiny_model), f"critic.init={first}", "run.steps=1", method=method
    )
    assert again.metrics[-1]["step"] == 1
    with pytest.raises(CheckpointError, match=r"critic\.init: .*another base or other model\.lora"):
        online(
            tmp_path / "other",
            str(tiny_model),
            f"critic.init={first}",
            "run.steps=1",
            method=method,
            lora={**LORA, "alpha": 9.0},
        )


# Offline methods.


@pytest.mark.parametrize(
    ("method", "rows"), [("sft", "demonstrations"), ("dpo", "pairs"), ("kto", "labels")]
)
def test_an_offline_method_trains_the_adapter(
    method: str, rows: str, tiny_model: Path, tmp_path: Path
) -> None:
    run = offline(tmp_path / "run", tiny_model, method, rows)
    losses = [row["loss"] for row in run.metrics]
    assert losses[-1] < losses[0]
    if method == "dpo":
        assert losses[0] == pytest.approx(0.6931471805599453, abs=0)
    assert all(".lora_" in name for name in saved(run.path, "policy"))


def test_a_reward_model_is_exported_merged(tiny_model: Path, tmp_path: Path) -> None:
    run = offline(tmp_path / "run", tiny_model, "reward_model", "pairs")
    names = set(saved(run.path, "reward_model"))
    assert "head.weight" in names and all(
        ".lora_" in name for name in names if not name.startswith("head.")
    )
    folder = export(run.path, tmp_path / "judge")
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    assert not any("lora" in name for name, _ in plain.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.equal(
        plain.model.layers[0].self_attn.q_proj.weight, base.model.layers[0].self_attn.q_proj.weight
    )
    assert torch.equal(plain.model.norm.weight, base.model.norm.weight)
    assert "equal scores" in (folder / "README.md").read_text()


# Export.


def test_the_adapter_loads_in_plain_peft(trained: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = export(trained, tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {
        entry.name for entry in folder.iterdir()
    }
    over = AutoPeftModelForCausalLM.from_pretrained(folder)
    policy = surefoot.Run.open(trained).policy
    ids = torch.tensor([[9, 8, 7, 6]])
    with torch.no_grad():
        assert torch.equal(over(input_ids=ids).logits, policy(input_ids=ids).logits)
    names = set(safetensors.torch.load_file(folder / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    merged = export(trained, tmp_path / "merged", merge=True)
    plain = AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, policy(input_ids=ids).logits, atol=1e-4)
    assert plain.generation_config.eos_token_id == [0, 2]


def test_there_is_nothing_to_merge_without_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    run = online(tmp_path / "run", str(tiny_model), "run.steps=1", lora=None)
    with pytest.raises(ModelError, match=r"no adapter to merge; leave --merge out"):
        export(run.path, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_a_stage_passes_on_a_merged_model(tiny_model: Path, tmp_path: Path) -> None:
    surefoot.train(
        {
            "model": {"path": str(tiny_model), "lora": LORA},
            "data": {"source": "addition", "max_operand": 9},
            "run": {"dir": str(tmp_path / "chain"), "steps": 2, "trackers": []},
            "stages": [
                {"name": "sft", "method": "sft", "optim": {"learning_rate": 0.02, "batch_size": 3}},
                {
                    "name": "rl",
                    "model": {"path": "stage:sft"},
                    "method": {"name": "grpo", "group_size": 4, "kl": {"coef": 0.1}},
                    "reward": [{"use": "length", "max": 4}],
                    "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
                    "run": {"steps": 1, "stop_without_signal": "never"},
                },
            ],
        }
    )
    stages = tmp_path / "chain" / "stages"
    between = AutoModelForCausalLM.from_pretrained(stages / "01_sft" / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    names = [name for name, _ in base.named_parameters()]
    assert [name for name, _ in between.named_parameters()] == names
    merged = dict(between.named_parameters())
    moved = {n for n, p in base.named_parameters() if not torch.equal(p, merged[n])}
    assert len(moved) == 14 and all("_proj.weight" in name for name in moved)
    # The second stage has an adapter of its own on top, which starts at zero.
    assert all(".lora_" in name for name in saved(stages / "02_rl", "policy"))
    assert (stages / "02_rl" / "model" / "config.json").is_file()
