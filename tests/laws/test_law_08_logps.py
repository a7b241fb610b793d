"""Law 8: the engine's log-probabilities are those of what it sampled, and the trainer's agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.engines import PROMPTS, ids_of, make_engine
from support.tiny import architectures, make_model, save_tiny

from surefoot.errors import RecipeError
from surefoot.learner.batch import make_batch
from surefoot.learner.layouts import NAMES, Bundle, build
from surefoot.learner.scorer import Scorer
from surefoot.loops.assemble import sampling
from surefoot.methods import online_rows
from surefoot.recipe import load


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [64, 5, 1])
@pytest.mark.parametrize("architecture", architectures())
def test_trainer_and_engine_agree(architecture: str, rows: int, temperature: float) -> None:
    model = make_model(architectures()[architecture])
    groups = make_engine(model, rows=rows, temperature=temperature).sample(
        PROMPTS, 3, purpose="rollout"
    )
    batch = make_batch(groups)
    scorer = Scorer(model, compute=torch.float32, head_dtype=torch.float32, temperature=temperature)
    bundles = [
        Bundle(g.prompt.ids, tuple(c.ids for c in g.completions), (3 * i, 3 * i + 1, 3 * i + 2))
        for i, g in enumerate(groups)
    ]
    for layout in NAMES[1:]:
        part = build(layout, bundles)
        with torch.no_grad():
            logp_N = scorer(part).logp_N.double()
        sampled_N = batch.sampled_logp_BT[part.rows_N, part.columns_N]
        assert float((logp_N - sampled_N).abs().max()) < 1e-4


def test_raw_log_probabilities_would_not_agree() -> None:
    """The check above can fail: at another temperature the trainer says something else."""
    model = make_model()
    (group,) = make_engine(model, temperature=0.6).sample(PROMPTS[:1], 1, purpose="rollout")
    scorer = Scorer(model, compute=torch.float32, head_dtype=torch.float32, temperature=1.0)
    part = build("rows", [Bundle(group.prompt.ids, (group.completions[0].ids,), (0,))])
    gap = scorer(part).logp_N.detach() - torch.tensor(group.completions[0].logps)
    assert float(gap.abs().max()) > 1e-2


def test_a_models_generation_defaults_change_nothing(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    recipe = {
        "model": str(folder),
        "data": "addition",
        "reward": "exact",
        "method": "rloo",
        "run": {"steps": 1},
    }
    before = sampling(load(recipe))
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    defaults = {"temperature": 0.1, "top_k": 1, "do_sample": True, "max_new_tokens": 2}
    path.write_text(json.dumps({**config, **defaults, "repetition_penalty": 5.0, "min_p": 0.9}))
    assert sampling(load(recipe)) == before
    from surefoot.models import load_model

    loaded = load_model(load(recipe))
    engine = make_engine(loaded.model)
    assert ids_of(engine.sample(PROMPTS, 8, purpose="rollout")) == ids_of(
        make_engine().sample(PROMPTS, 8, purpose="rollout")
    )
    assert len(set(ids_of(engine.sample(PROMPTS[:1], 8, purpose="rollout")))) > 1


@pytest.mark.parametrize(
    "key", ["top_p=0.9", "top_k=5", "min_p=0.1", "min_new_tokens=3"], ids=lambda k: k.split("=")[0]
)
@pytest.mark.parametrize("method", online_rows())
def test_truncated_sampling_is_refused_unless_allowed(key: str, method: str) -> None:
    recipe = {"data": "addition", "reward": "exact", "method": method, "run": {"steps": 1}}
    with pytest.raises(RecipeError, match="truncated_sampling"):
        load(recipe, [f"rollout.{key}"])
    load(recipe, [f"rollout.{key}", "run.allow=[truncated_sampling]"])
