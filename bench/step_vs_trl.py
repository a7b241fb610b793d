"""One GRPO step on SmolLM2-135M, here and in TRL: the same work, timed side by side in one run.

    python bench/step_vs_trl.py       everything; writes bench/results/step_vs_trl.{json,txt}
    python bench/step_vs_trl.py --shapes 2x2x4 --steps 1      a smoke test

First the same tokens go through both losses in float32: loss and gradient must agree (relative
norm 1e-4). Then each side takes whole steps (sample, score, update) in a process of its own, in
turn, so that the machine's drift hits both. Rewards are random, so that every group is live, and
every completion runs to its cap. Both train float32 weights in bfloat16, AdamW, KL coefficient 0;
TRL is timed in the fastest of the settings that are tried on the first shape (bfloat16 weights
among them), without gradient checkpointing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
TRL_SETTINGS = {
    "float32 weights, bfloat16 autocast": {"weights": "float32", "allocator": "0"},
    "bfloat16 weights": {"weights": "bfloat16", "allocator": "0"},
    "float32 weights, bfloat16 autocast, kept blocks": {"weights": "float32", "allocator": "1"},
    "bfloat16 weights, kept blocks": {"weights": "bfloat16", "allocator": "1"},
}
# The same settings of glibc that surefoot.loops.process.tune_allocator makes in our process.
KEPT_BLOCKS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_TOP_PAD_": "67108864",
}
QUESTION = "What is 1{a} + 2{b}?"


def messages(count: int, offset: int = 0) -> list[list[dict[str, str]]]:
    """Prompts of equal length, so that neither side pads them."""
    return [
        [
            {
                "role": "user",
                "content": QUESTION.format(a=(i + offset) % 10, b=((i + offset) // 10) % 10),
            }
        ]
        for i in range(count)
    ]


def model_directory() -> str:
    from surefoot.models.alias import SMOLLM2, alias_directory

    return str(alias_directory(SMOLLM2))


# -- our side ---------------------------------------------------------------------------------


def our_recipe(shape: tuple[int, int, int], *, compute: str, folder: str) -> Any:
    from surefoot.recipe import load

    prompts, group, tokens = shape
    return load(
        {
            "model": {"path": "smollm2-135m", "dtype": "float32", "compute": compute},
            "data": {"source": "addition"},
            "reward": [{"use": "numeric"}],
            "method": {"name": "grpo", "group_size": group, "kl": {"coef": 0.0}},
            "rollout": {
                "prompts_per_step": prompts,
                "max_new_tokens": tokens,
                "min_new_tokens": tokens,
            },
            "optim": {"learning_rate": 1e-5},
            "run": {"dir": folder, "steps": 100, "allow": ["truncated_sampling"]},
        }
    )


def our_parts(shape: tuple[int, int, int], *, compute: str) -> tuple[Any, Any]:
    from surefoot.loops.assemble import Outside, assemble, make_learner, resolve_budget

    recipe = our_recipe(shape, compute=compute, folder=tempfile.mkdtemp())
    parts = assemble(recipe, Outside(), interrupt=lambda: None)
    parts.recipe = resolve_budget(parts.recipe, parts.loaded)
    learner, _ = make_learner(parts)
    # The KL is neither trained nor measured in this comparison.
    learner.reference = None
    return parts, learner


def our_prompts(parts: Any, count: int, offset: int = 0) -> list[Any]:
    from surefoot.records import Prompt

    template = parts.loaded.template
    return [
        Prompt(id=str(i), position=i + offset, ids=template.encode(m), text=m[0]["content"])
        for i, m in enumerate(messages(count, offset))
    ]


def our_update(
    parts: Any,
    learner: Any,
    groups: Any,
    rewards: list[list[float]],
    step: int,
    old_shift: Any = None,
) -> Any:
    """Credit and update of scored groups, as the online loop does them.

    `old_shift` [B, T] puts the old log-probabilities that far above the sampled ones.
    """
    from surefoot.learner.batch import make_batch
    from surefoot.learner.update import Facts
    from surefoot.loops.credit import assign, stand
    from surefoot.records import Score, ScoreStatus

    scored = [
        g.scored(tuple(Score(ScoreStatus.SCORED, value) for value in row))
        for g, row in zip(groups, rewards, strict=True)
    ]
    batch = make_batch(scored)
    limit = parts.recipe.rollout.max_new_tokens
    standing = stand(parts.row, batch, max_new_tokens=limit)
    credit = assign(parts.row, batch, standing, Facts())
    plan = learner.plan(batch, credit.forwarded_B, step=step)
    facts = Facts()
    if old_shift is not None:
        facts = Facts(old_logp_BT=batch.sampled_logp_BT + old_shift * batch.mask_BT)
    return learner.update(batch, plan, credit.signal, facts, step=step)


def run_ours(shape: tuple[int, int, int], steps: int) -> dict[str, Any]:
    from surefoot.loops.process import tune_allocator

    tune_allocator()
    parts, learner = our_parts(shape, compute="bfloat16")
    prompts, group, tokens = shape
    rng = random.Random(0)
    times, sampling = [], []
    for step in range(1, steps + 2):
        began = time.perf_counter()
        parts.engine.load(parts.loaded.model, version=step - 1)
        asked = our_prompts(parts, prompts, offset=(step - 1) * prompts)
        groups = parts.engine.sample(asked, group, purpose="rollout")
        sampled = time.perf_counter()
        assert all(len(c.ids) == tokens for g in groups for c in g.completions)
        rewards = [[rng.random() for _ in range(group)] for _ in range(prompts)]
        report = our_update(parts, learner, groups, rewards, step)
        assert report.steps == 1 and report.skipped == 0
        times.append(time.perf_counter() - began)
        sampling.append(sampled - began)
    parts.grader.close()
    return {
        "step": times[1:],
        "sampling": sampling[1:],
        "forwarded": report.forwarded,
        "layouts": dict(report.layouts),
        "prompt_tokens": len(asked[0].ids),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# -- TRL's side -------------------------------------------------------------------------------


def trl_trainer(
    shape: tuple[int, int, int], steps: int, *, weights: str, half: bool, loss_type: str = "grpo"
) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    prompts, group, tokens = shape
    folder = model_directory()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, weights))
    rng = random.Random(0)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [rng.random() for _ in completions]

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=prompts * group,
        gradient_accumulation_steps=1,
        num_generations=group,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        max_steps=steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type=loss_type,
        temperature=1.0,
        top_k=0,
        bf16=half,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": m} for m in messages(prompts * steps)])
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
    )


def run_trl(shape: tuple[int, int, int], steps: int, weights: str) -> dict[str, Any]:
    from transformers import TrainerCallback

    trainer = trl_trainer(shape, steps + 1, weights=weights, half=True)
    times: list[float] = []
    sampling: list[float] = []
    lengths: list[float] = []
    generate = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        began = time.perf_counter()
        out = generate(inputs)
        sampling.append(time.perf_counter() - began)
        lengths.append(float(out["completion_mask"].sum(1).float().min()))
        return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter() - self.began)

    trainer._generate_and_score_completions = timed
    trainer.add_callback(Clock())
    trainer.train()
    assert min(lengths) == shape[2], lengths
    return {
        "step": times[1:],
        "sampling": sampling[1:],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# -- equal loss and gradient -------------------------------------------------------------------


def run_check() -> dict[str, float]:
    """The same tokens and rewards through both losses, float32 throughout."""
    import torch

    from surefoot.records import Completion, Group, StopReason

    shape = (3, 4, 12)
    parts, learner = our_parts(shape, compute="float32")
    asked = our_prompts(parts, shape[0])
    parts.engine.settings = type(parts.engine.settings)(temperature=1.0, max_new_tokens=12)
    groups = parts.engine.sample(asked, shape[1], purpose="rollout")
    # Unequal lengths, so that padding and the per-sequence mean are tested too.
    cut = [3, 12, 7, 1]
    groups = [
        Group(
            g.prompt,
            tuple(
                Completion(
                    c.ids[: cut[i]], c.logps[: cut[i]], StopReason.LENGTH, 0, c.sample, c.text
                )
                for i, c in enumerate(g.completions)
            ),
        )
        for g in groups
    ]
    rng = random.Random(1)
    rewards = [[rng.random() for _ in range(shape[1])] for _ in range(shape[0])]
    kept: dict[str, Any] = {}

    def record(*, rate: float, norm: float) -> None:
        model = parts.loaded.model
        kept["grad"] = {n: p.grad.clone() for n, p in model.named_parameters()}

    learner.optimizer.step = record
    # Old log-probabilities off by up to 0.5 nats: the loss is not 0 then, and the clip acts.
    shift = torch.rand(12, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    shift = shift - 0.5
    report = our_update(parts, learner, groups, rewards, 1, old_shift=shift)
    parts.grader.close()
    assert report.sums["clip_low"] > 0 and report.sums["clip_high"] > 0, report.sums

    trainer = trl_trainer(shape, 1, weights="float32", half=False)
    trainer.current_gradient_accumulation_steps = 1
    flat = [c for g in groups for c in g.completions]
    width = max(len(c.ids) for c in flat)
    ids = torch.full((len(flat), width), trainer.processing_class.pad_token_id)
    mask = torch.zeros(len(flat), width, dtype=torch.long)
    old = torch.zeros(len(flat), width)
    for i, completion in enumerate(flat):
        old[i, : len(completion.ids)] = torch.tensor(completion.logps)
        ids[i, : len(completion.ids)] = torch.tensor(completion.ids)
        mask[i, : len(completion.ids)] = 1
    prompt = torch.tensor([g.prompt.ids for g in groups for _ in g.completions])
    table = torch.tensor(rewards)
    centered = table - table.mean(1, keepdim=True)
    advantages = (centered / (table.std(1, keepdim=True) + 1e-4)).reshape(-1)
    trainer.model.train()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old + shift.float(),
        },
    )
    loss.backward()
    theirs = {n: p.grad for n, p in trainer.model.named_parameters()}
    assert set(theirs) == set(kept["grad"])
    top = sum(float((kept["grad"][n] - theirs[n]).square().sum()) for n in theirs) ** 0.5
    bottom = sum(float(g.square().sum()) for g in theirs.values()) ** 0.5
    return {
        "loss_ours": report.loss,
        "loss_trl": float(loss.detach()),
        "gradient_relative": top / bottom,
        "gradient_norm": bottom,
    }


# -- the floor ---------------------------------------------------------------------------------


def _rate(call: Any, flops: float) -> float:
    """FLOP/s of a call, best of five."""
    call()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return flops / best


def run_floor(shape: tuple[int, int, int], prompt_tokens: int) -> dict[str, float]:
    """Counted work of a step over rates timed bare on the model's own shapes (DESIGN section 8)."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_directory())
    hidden, inner, layers = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
    )
    narrow = config.num_key_value_heads * config.head_dim
    shapes = [(hidden, hidden), (narrow, hidden), (narrow, hidden), (hidden, hidden)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    weights = [torch.randn(o, i).bfloat16() for _ in range(layers) for o, i in shapes]
    body = sum(w.numel() for w in weights)
    vocabulary = config.vocab_size

    def products(rows: int) -> Any:
        inputs = {w: torch.randn(rows, w).bfloat16() for w in (hidden, inner)}

        def call() -> None:
            for weight in weights:
                inputs[weight.shape[1]] @ weight.T

        return call

    prompts, group, tokens = shape
    live = prompts * group
    with torch.inference_mode():
        wide = min(1024, prompts * (prompt_tokens + group * tokens))
        gemm = _rate(products(wide), 2.0 * wide * body)
        decode = _rate(products(live), 2.0 * live * body)
        half = torch.randn(vocabulary, hidden).bfloat16()
        rows = torch.randn(live, hidden).bfloat16()
        head_decode = _rate(lambda: rows @ half.T, 2.0 * live * hidden * vocabulary)
        full = half.float()
        wide_rows = torch.randn(512, hidden)
        head = _rate(lambda: wide_rows @ full.T, 2.0 * 512 * hidden * vocabulary)
        block = torch.randn(64 << 20)
        # A copy reads and writes each byte.
        memory = 2.0 * _rate(block.clone, block.numel() * 4.0)
    head_size = hidden * vocabulary
    cache = 2 * layers * narrow * 2
    per_position = max(
        (2 * (body + head_size) + live * (prompt_tokens + tokens / 2) * cache) / memory,
        2.0 * live * body / decode + 2.0 * live * head_size / head_decode,
    )
    distinct = prompts * (prompt_tokens + group * tokens)
    scored = prompts * group * tokens
    out = {
        "decode": tokens * per_position,
        "prefill": 2.0 * prompts * prompt_tokens * body / gemm,
        "train": 6.0 * distinct * body / gemm,
        "head": 6.0 * scored * head_size / head,
    }
    rates = {"gemm": gemm, "decode": decode, "head_float32": head, "memory_bytes": memory}
    return {**out, "total": sum(out.values()), **{f"rate_{k}": v for k, v in rates.items()}}


# -- the orchestrator --------------------------------------------------------------------------


def child(*arguments: str, allocator: bool = False) -> dict[str, Any]:
    """Run this file again in a fresh process; its last line of output is JSON."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if allocator:
        environment.update(KEPT_BLOCKS)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{arguments}: failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def trl_child(shape: str, steps: int, setting: str) -> dict[str, Any]:
    chosen = TRL_SETTINGS[setting]
    return child(
        "--side", "trl", "--shapes", shape, "--steps", str(steps), "--weights", chosen["weights"],
        allocator=chosen["allocator"] == "1",
    )  # fmt: skip


def compare(shape: str, settings: list[str], steps: int) -> dict[str, Any]:
    """Ours, TRL in each of the settings, and ours again, so that drift shows."""
    ours = [child("--side", "ours", "--shapes", shape, "--steps", str(steps))]
    theirs = {name: _facts([trl_child(shape, steps, name)]) for name in settings}
    ours.append(child("--side", "ours", "--shapes", shape, "--steps", str(steps)))
    prompt_tokens = str(ours[0]["prompt_tokens"])
    floor = child("--side", "floor", "--shapes", shape, "--prompt-tokens", prompt_tokens)
    mine = _facts(ours)
    return {
        "shape": shape,
        "ours": mine,
        "trl": theirs,
        "ratio_median": {n: facts["median"] / mine["median"] for n, facts in theirs.items()},
        "ratio_best": {n: facts["best"] / mine["best"] for n, facts in theirs.items()},
        "layouts": ours[0]["layouts"],
        "floor": floor,
        "ours_over_floor": mine["best"] / floor["total"],
    }


def _pool(runs: list[dict[str, Any]], key: str = "step") -> list[float]:
    return [value for run in runs for value in run[key]]


def _facts(runs: list[dict[str, Any]]) -> dict[str, Any]:
    steps = _pool(runs)
    return {
        "seconds": steps,
        "median": statistics.median(steps),
        "best": min(steps),
        "sampling_median": statistics.median(_pool(runs, "sampling")),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def sweep(shape: str) -> dict[str, float]:
    """One timed step of TRL in each setting."""
    return {name: min(trl_child(shape, 1, name)["step"]) for name in TRL_SETTINGS}


def _line(name: str, facts: dict[str, Any], ratio: float | None) -> str:
    text = (
        f"  {name:52}{facts['median']:8.2f}{facts['best']:8.2f}{facts['sampling_median']:10.2f}"
        f"{facts['peak_bytes'] / 2**30:10.1f}"
    )
    return text if ratio is None else f"{text}{ratio:8.2f}"


def report(result: dict[str, Any]) -> str:
    check = result["check"]
    lines = [
        "One GRPO step on SmolLM2-135M: surefoot and TRL " + result["versions"]["trl"],
        f"torch {result['versions']['torch']}, {result['threads']} threads, "
        f"transformers {result['versions']['transformers']}",
        "",
        f"same tokens, float32: loss {check['loss_ours']:.8f} and {check['loss_trl']:.8f}, "
        f"gradient differs by {check['gradient_relative']:.1e} (relative norm)",
        "",
        f"TRL settings on {result['sweep_shape']}, one step each:",
        *(f"  {seconds:7.2f} s  {name}" for name, seconds in result["sweep"].items()),
    ]
    for row in result["shapes"]:
        floor = row["floor"]
        lines += [
            "",
            f"{row['shape']} (prompts x group x new tokens), layouts {row['layouts']}",
            f"  {'':52}{'median':>8}{'best':>8}{'sampling':>10}{'peak GiB':>10}{'ratio':>8}",
            _line("surefoot", row["ours"], None),
        ]
        lines += [
            _line(f"TRL, {name}", facts, row["ratio_median"][name])
            for name, facts in row["trl"].items()
        ]
        lines.append(
            f"  floor {floor['total']:.2f} s = decode {floor['decode']:.2f} + prefill "
            f"{floor['prefill']:.2f} + train {floor['train']:.2f} + head {floor['head']:.2f}; "
            f"surefoot's best step is {row['ours_over_floor']:.2f} times that"
        )
    lines += [
        "",
        "Seconds. Ratio: TRL's median over surefoot's. Sampling of TRL includes its reward call. "
        "Kept blocks:",
        "glibc keeps freed memory, as surefoot's training process tells it to; given to TRL by",
        "environment variables, which TRL itself does not set. bfloat16 weights train without a "
        "float32 copy:",
        "less exact and less work than what surefoot does here.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8x8x12,4x8x128")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a process")
    parser.add_argument("--side", choices=["ours", "trl", "check", "floor"])
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    if options.side is not None:
        shape = tuple(int(n) for n in shapes[0].split("x"))
        sides = {
            "ours": lambda: run_ours(shape, options.steps),
            "trl": lambda: run_trl(shape, options.steps, options.weights),
            "check": run_check,
            "floor": lambda: run_floor(shape, options.prompt_tokens),
        }
        print("\n" + json.dumps(sides[options.side]()))
        return
    import torch
    import transformers
    import trl

    result: dict[str, Any] = {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "threads": torch.get_num_threads(),
        "check": child("--side", "check"),
        "sweep_shape": shapes[0],
        "sweep": sweep(shapes[0]),
    }
    assert result["check"]["gradient_relative"] < 1e-4, result["check"]
    timed = result["sweep"]
    # TRL's fastest setting as it comes, and its fastest with our process's allocator settings.
    chosen = [
        min((n for n in timed if ("kept" in n) == kept), key=lambda name: timed[name])
        for kept in (False, True)
    ]
    result["shapes"] = [compare(s, chosen, options.steps) for s in shapes]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step_vs_trl.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "step_vs_trl.txt").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    main()
