"""The two sides of step_vs_trl.py: surefoot's GRPO step and TRL's, and the check that they agree.

    python bench/step_sides.py ours --shape 8x8x12             one step for each line on stdin
    python bench/step_sides.py trl --shape 8x8x12 --weights bfloat16 --batch 32
    python bench/step_sides.py check                          the same tokens through both losses

Owns what one step is on each side. Refuses to own settings and figures (step_vs_trl.py) and the
conversation (turns.py).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from typing import Any

from turns import answer, peak_bytes, wait

Shape = tuple[int, int, int]


def parse(text: str) -> Shape:
    """Prompts x group x new tokens."""
    prompts, group, tokens = (int(number) for number in text.split("x"))
    return prompts, group, tokens


def messages(count: int, offset: int) -> list[list[dict[str, str]]]:
    """Prompts of equal length, so that neither side pads them."""
    numbers = [(n // 10 % 10, n % 10) for n in range(offset, offset + count)]
    return [[{"role": "user", "content": f"What is 1{a} + 2{b}?"}] for a, b in numbers]


def model_directory() -> str:
    from surefoot.models.alias import SMOLLM2, alias_directory

    return str(alias_directory(SMOLLM2))


def answer_step(step: float, sampling: float, **facts: Any) -> None:
    answer({"step": step, "sampling": sampling, "peak_bytes": peak_bytes(), **facts})


# -- our side ---------------------------------------------------------------------------------


def our_parts(shape: Shape, *, compute: str, weights: str = "float32") -> tuple[Any, Any]:
    """The parts of a training process, assembled as `surefoot train` does.

    The LM head is in the precision of the weights.
    """
    from surefoot.loops.assemble import Outside, assemble, make_learner, resolve_budget
    from surefoot.recipe import load

    prompts, group, tokens = shape
    recipe = load(
        {
            "model": {
                "path": "smollm2-135m",
                "dtype": weights,
                "compute": compute,
                "head_dtype": weights,
            },
            "data": {"source": "addition"},
            "reward": [{"use": "numeric"}],
            "method": {"name": "grpo", "group_size": group, "kl": {"coef": 0.0}},
            "rollout": {
                "prompts_per_step": prompts,
                "max_new_tokens": tokens,
                "min_new_tokens": tokens,
            },
            "optim": {"learning_rate": 1e-5},
            "run": {"dir": tempfile.mkdtemp(), "steps": 100, "allow": ["truncated_sampling"]},
        }
    )
    parts = assemble(recipe, Outside(), interrupt=lambda: None)
    parts.grader.close()
    parts.recipe = resolve_budget(parts.recipe, parts.loaded)
    learner, _ = make_learner(parts)
    # The KL is neither trained nor measured here, as in TRL with beta 0.
    learner.reference = None
    return parts, learner


def our_prompts(parts: Any, count: int, offset: int) -> list[Any]:
    from surefoot.records import Prompt

    return [
        Prompt(
            id=str(i),
            position=i + offset,
            ids=parts.loaded.template.encode(m),
            text=m[0]["content"],
        )
        for i, m in enumerate(messages(count, offset))
    ]


def our_update(
    parts: Any,
    learner: Any,
    groups: Any,
    rewards: list[list[float]],
    *,
    step: int,
    old_shift: Any = None,
) -> Any:
    """Credit and update of scored groups, as the online loop does them.

    `old_shift` [B, T] puts the old log-probabilities that far above the sampled ones.
    """
    from surefoot.learner.batch import make_batch
    from surefoot.learner.update import Facts
    from surefoot.loops.credit import assign
    from surefoot.loops.standing import stand
    from surefoot.records import Score, ScoreStatus

    scored = [
        g.scored(tuple(Score(ScoreStatus.SCORED, value) for value in row))
        for g, row in zip(groups, rewards, strict=True)
    ]
    batch = make_batch(scored)
    limit = parts.recipe.rollout.max_new_tokens
    standing = stand(parts.row, batch, max_new_tokens=limit, weights={"random": 1.0})
    credit = assign(parts.row, batch, standing, Facts())
    plan = learner.plan(batch, credit.forwarded_B, step=step)
    facts = Facts()
    if old_shift is not None:
        facts = Facts(old_logp_BT=batch.sampled_logp_BT + old_shift * batch.mask_BT)
    return learner.update(batch, plan, credit.signal, facts, step=step)


def ours(shape: Shape, *, weights: str) -> None:
    """Sample, credit, update: one step a turn."""
    from surefoot.loops.process import tune_allocator
    from surefoot.rollout import LocalEngine

    tune_allocator()
    parts, learner = our_parts(shape, compute="bfloat16", weights=weights)
    assert isinstance(parts.engine, LocalEngine) and parts.engine.decoder is not None
    prompts, group, tokens = shape
    rng = random.Random(0)
    step = 0
    while wait():
        began = time.perf_counter()
        parts.engine.load(parts.loaded.model, version=step)
        asked = our_prompts(parts, prompts, step * prompts)
        groups = parts.engine.sample(asked, group, purpose="rollout")
        sampled = time.perf_counter()
        rewards = [[rng.random() for _ in range(group)] for _ in range(prompts)]
        step += 1
        report = our_update(parts, learner, groups, rewards, step=step)
        ended = time.perf_counter()
        assert all(len(c.ids) == tokens for g in groups for c in g.completions)
        assert report.steps == 1 and report.skipped == 0, report
        # Every group is live: every completion's advantage is non-zero and it was forwarded.
        assert int(report.known_BT.sum()) == prompts * group * tokens
        answer_step(
            ended - began,
            sampled - began,
            forwarded=report.forwarded,
            layouts=dict(report.layouts),
            prompt_tokens=len(asked[0].ids),
        )


# -- TRL's side -------------------------------------------------------------------------------


def trl_trainer(shape: Shape, *, weights: str, half: bool, batch: int, steps: int) -> Any:
    """A GRPOTrainer whose step is one optimizer step over `shape`, `batch` sequences a pass."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    prompts, group, tokens = shape
    folder = model_directory()
    rng = random.Random(0)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [rng.random() for _ in completions]

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=prompts * group // batch,
        num_generations=group,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        max_steps=steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        top_k=0,
        bf16=half,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=100_000,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, weights)),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": m} for m in messages(prompts * steps, 0)]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )


def trl(shape: Shape, *, weights: str, batch: int) -> None:
    """TRL's own training loop, held before each step until its turn."""
    from transformers import TrainerCallback

    trainer = trl_trainer(shape, weights=weights, half=True, batch=batch, steps=100)
    generate = trainer._generate_and_score_completions
    sampling: list[float] = []

    def timed(inputs: Any) -> Any:
        began = time.perf_counter()
        out = generate(inputs)
        sampling.append(time.perf_counter() - began)
        assert (out["completion_mask"].sum(1) == shape[2]).all(), "a completion ended early"
        assert (out["advantages"] != 0).all(), "a dead group"
        return out

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not wait():
                raise SystemExit
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = time.perf_counter() - self.began
            assert len(sampling) == 1, "one generation a step"
            answer_step(step, sampling.pop())

    trainer._generate_and_score_completions = timed
    trainer.add_callback(Turns())
    trainer.train()


# -- equal loss and gradient -------------------------------------------------------------------

CHECKED = (3, 4, 12)
CUT = (3, 12, 7, 1)


def uneven(groups: Any) -> list[Any]:
    """Cut completions to unequal lengths: padding and the mean per sequence are tested too."""
    from surefoot.records import Completion, Group, StopReason

    return [
        Group(
            g.prompt,
            tuple(
                Completion(c.ids[:n], c.logps[:n], StopReason.LENGTH, 0, c.sample, c.text)
                for n, c in zip(CUT, g.completions, strict=True)
            ),
        )
        for g in groups
    ]


def our_gradient(rewards: list[list[float]], shift: Any) -> tuple[Any, float, dict[str, Any]]:
    """Sampled groups, our loss on them, and its gradient by parameter name."""
    from surefoot.rollout import Sampling

    parts, learner = our_parts(CHECKED, compute="float32")
    parts.engine.settings = Sampling(temperature=1.0, max_new_tokens=CHECKED[2])
    asked = our_prompts(parts, CHECKED[0], 0)
    groups = parts.engine.sample(asked, CHECKED[1], purpose="rollout")
    groups = uneven(groups)
    gradient: dict[str, Any] = {}

    def record(*, rate: float, norm: float) -> None:
        named = parts.loaded.model.named_parameters()
        gradient.update({name: p.grad.clone() for name, p in named})

    learner.optimizer.step = record
    report = our_update(parts, learner, groups, rewards, step=1, old_shift=shift)
    assert report.sums["clip_low"] > 0 and report.sums["clip_high"] > 0, report.sums
    return groups, report.loss, gradient


def trl_gradient(
    groups: Any, rewards: list[list[float]], shift: Any
) -> tuple[float, dict[str, Any]]:
    """TRL's loss on the same tokens, with the advantages that TRL documents, and its gradient."""
    import torch

    count = CHECKED[0] * CHECKED[1]
    trainer = trl_trainer(CHECKED, weights="float32", half=False, batch=count, steps=1)
    trainer.current_gradient_accumulation_steps = 1
    flat = [c for g in groups for c in g.completions]
    width = max(len(c.ids) for c in flat)
    ids = torch.full((count, width), trainer.processing_class.pad_token_id)
    mask = torch.zeros(count, width, dtype=torch.long)
    old = torch.zeros(count, width)
    for i, completion in enumerate(flat):
        length = len(completion.ids)
        old[i, :length] = torch.tensor(completion.logps)
        ids[i, :length] = torch.tensor(completion.ids)
        mask[i, :length] = 1
    prompt = torch.tensor([g.prompt.ids for g in groups for _ in g.completions])
    reward = torch.tensor(rewards)
    centered = reward - reward.mean(1, keepdim=True)
    trainer.model.train()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": (centered / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1),
            "old_per_token_logps": old + shift.float(),
        },
    )
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in trainer.model.named_parameters()}


def check() -> None:
    """The same tokens, rewards and old log-probabilities through both losses, in float32."""
    import torch

    rng = random.Random(1)
    rewards = [[rng.random() for _ in range(CHECKED[1])] for _ in range(CHECKED[0])]
    # Old log-probabilities off by up to 0.5 nats: the loss is not 0 then, and the clip acts.
    generator = torch.Generator().manual_seed(2)
    size = (CHECKED[0] * CHECKED[1], CHECKED[2])
    shift = torch.rand(size, generator=generator, dtype=torch.float64) - 0.5
    groups, loss, gradient = our_gradient(rewards, shift)
    their_loss, theirs = trl_gradient(groups, rewards, shift)
    assert set(theirs) == set(gradient)
    apart = sum(float((gradient[n] - theirs[n]).double().square().sum()) for n in theirs) ** 0.5
    norm = sum(float(g.double().square().sum()) for g in theirs.values()) ** 0.5
    answer(
        {
            "loss_ours": loss,
            "loss_trl": their_loss,
            "loss_relative": abs(loss - their_loss) / abs(their_loss),
            "gradient_relative": apart / norm,
            "gradient_norm": norm,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["ours", "trl", "check"])
    parser.add_argument("--shape", type=parse, default="8x8x12")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, help="TRL's sequences a pass; default: all of them")
    options = parser.parse_args()
    if options.side == "ours":
        ours(options.shape, weights=options.weights)
    elif options.side == "trl":
        batch = options.batch or options.shape[0] * options.shape[1]
        trl(options.shape, weights=options.weights, batch=batch)
    else:
        check()


if __name__ == "__main__":
    main()
