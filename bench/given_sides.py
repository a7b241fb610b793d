"""The two sides of given_vs_trl.py: DPO and SFT steps of surefoot and of TRL on the same tokens.

    python bench/given_sides.py batch dpo FILE                write a batch, as text and as ids
    python bench/given_sides.py ours FILE --precision default         a step for each line on stdin
    python bench/given_sides.py trl FILE --precision half --passes 4

Owns the batch, and what one step is on each side. Refuses to own settings and figures
(given_vs_trl.py) and the conversation (turns.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turns import answer, peak_bytes, wait

RATE = 1e-5
BETA = 0.1
OURS = {
    "exact": ("float32", "float32", "float32"),
    "default": ("float32", "bfloat16", "float32"),
    "autocast": ("float32", "bfloat16", "bfloat16"),
    "half": ("bfloat16", "bfloat16", "bfloat16"),
}
"""Weights, compute and LM head by name."""
TRL = {
    "exact": ("float32", False),
    "autocast": ("float32", True),
    "half autocast": ("bfloat16", True),
    "half": ("bfloat16", False),
}
"""Weights, and whether autocast rounds the products to bfloat16."""


# -- the batch ---------------------------------------------------------------------------------


def cut(text: str, tokens: int, encode: Callable[[str], tuple[int, ...]], tokenizer: Any) -> str:
    """The beginning of a text that `encode` makes exactly that many tokens of."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for count in range(min(tokens, len(ids)), 0, -1):
        # A token cut in two may be read back as others, so the count is asked, not computed.
        piece: str = tokenizer.decode(ids[:count])
        if len(encode(piece)) == tokens:
            return piece
    raise SystemExit(f"no beginning of this text has {tokens} tokens: {text[:60]!r}")


def stories(text: Path) -> tuple[list[str], list[str], list[str]]:
    """Solved problems, their right solutions, and a small model's."""

    def plain(words: str) -> str:
        return words.encode("ascii", "ignore").decode()

    with gzip.open(text, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    right = [plain(row["ground_truth"]) for row in rows]
    solved = [f"Q: {plain(r['question'])}\nA: {a}\n\n" for r, a in zip(rows, right, strict=True)]
    return solved, right, [plain(row["6b_finetuning"]["solution"]) for row in rows]


def make_batch(task: str, model: str, template: str, text: Path, sizes: list[list[int]]) -> Any:
    """`sizes`: tokens of prompt, chosen and rejected, or of prompt and completion, of each row."""
    from transformers import AutoTokenizer

    from surefoot.models.template import PromptTemplate
    from surefoot.models.turns import ExampleTemplate

    tokenizer = AutoTokenizer.from_pretrained(directory(model))
    coder = ExampleTemplate(PromptTemplate(tokenizer, template=template, max_context=1 << 20))
    solved, right, wrong = stories(text)

    def asked(prompt: str) -> Any:
        return prompt if template == "none" else [{"role": "user", "content": prompt}]

    rows, examples = [], []
    for i, wanted in enumerate(sizes):
        some = slice(20 * i, 20 * i + 20)
        prompt = cut("".join(solved[some]), wanted[0], lambda p: coder.encode(asked(p)), tokenizer)
        start = coder.encode(asked(prompt))

        def ended(told: str, prompt: str = prompt) -> tuple[int, ...]:
            return coder.completion(asked(prompt), told)[0]

        told = [
            cut("\n".join(words[some]), tokens, ended, tokenizer)
            for words, tokens in zip((right, wrong), wanted[1:], strict=False)
        ]
        ids = [ended(piece) for piece in told]
        row = {"id": str(i), "prompt": prompt}
        if task == "dpo":
            assert ids[0] != ids[1], "a tie, which no run would read"
            rows.append({**row, "chosen": told[0], "rejected": told[1]})
            examples.append({"prompt_ids": start, "chosen_ids": ids[0], "rejected_ids": ids[1]})
        else:
            rows.append({**row, "completion": told[0]})
            labels = [-100] * len(start) + list(ids[0])
            examples.append({"input_ids": [*start, *ids[0]], "labels": labels})
    return {"task": task, "model": model, "template": template, "rows": rows, "examples": examples}


def directory(model: str) -> str:
    from surefoot.models.alias import SMOLLM2, alias_directory

    return str(alias_directory(SMOLLM2)) if model == SMOLLM2 else model


# -- our side ----------------------------------------------------------------------------------


def recipe(batch: Mapping[str, Any], precision: str, folder: str) -> dict[str, Any]:
    dtype, compute, head = OURS[precision]
    return {
        "model": {
            "path": batch["model"],
            "template": batch["template"],
            "dtype": dtype,
            "compute": compute,
            "head_dtype": head,
        },
        "method": {"name": "dpo", "beta": BETA} if batch["task"] == "dpo" else {"name": "sft"},
        "optim": {"learning_rate": RATE, "batch_size": len(batch["rows"])},
        "run": {"dir": folder, "steps": 10_000, "checkpoint_every": 0, "trackers": []},
    }


def same_ids(batch: Mapping[str, Any], examples: Any) -> bool:
    """Whether our run reads the ids that TRL is given, trained tokens too."""
    found: list[dict[str, list[int]]] = []
    for e in sorted(examples, key=lambda example: int(example.id)):
        if batch["task"] == "dpo":
            parts = {"prompt_ids": e.prompt, "chosen_ids": e.chosen, "rejected_ids": e.rejected}
            found.append({name: list(ids) for name, ids in parts.items()})
        else:
            pairs = zip(e.ids, e.trained, strict=True)
            labels = [id if is_trained else -100 for id, is_trained in pairs]
            found.append({"input_ids": list(e.ids), "labels": labels})
    return found == batch["examples"]


def ours(batch: Mapping[str, Any], precision: str) -> None:
    """`surefoot.train`, held before each step until its turn."""
    import surefoot
    from surefoot.loops.preference import PreferenceTask
    from surefoot.loops.supervised import Imitation

    seen: list[Any] = []
    task: Any = PreferenceTask if batch["task"] == "dpo" else Imitation
    learn = task.learn

    def watched(self: Any, examples: Any, *, rate: float) -> Any:
        out = learn(self, examples, rate=rate)
        seen.append((examples, out[0].layouts))
        return out

    task.learn = watched

    class Turns(surefoot.Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> Any:
            assert metrics["optimizer_steps"] == 1 and metrics["skipped_steps"] == 0, dict(metrics)
            examples, layouts = seen.pop()
            assert same_ids(batch, examples), "our run reads other tokens than TRL is given"
            answer(
                {
                    "step": metrics["time/step"],
                    "loss": metrics["loss"],
                    "norm": metrics["grad_norm"],
                    "peak_bytes": peak_bytes(),
                    "forwarded": metrics["forwarded_tokens"],
                    "layouts": dict(layouts),
                }
            )
            return None if wait() else surefoot.STOP

    if wait():
        surefoot.train(
            recipe(batch, precision, tempfile.mkdtemp()), data=batch["rows"], callbacks=[Turns()]
        )


# -- TRL's side --------------------------------------------------------------------------------


def trl_trainer(batch: Mapping[str, Any], precision: str, passes: int, *, recompute: bool) -> Any:
    """A trainer whose step is one optimizer step over the batch, in so many passes."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class GivenIds(DPOTrainer):
        """Its batch is tokenised already, as SFTTrainer allows by itself."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    weights, is_autocast = TRL[precision]
    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": len(batch["rows"]) // passes,
        "gradient_accumulation_steps": passes,
        "max_steps": 10_000,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "bf16": is_autocast,
        "gradient_checkpointing": recompute,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    folder = directory(batch["model"])
    parts: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, weights), attn_implementation="sdpa"
        ),
        "train_dataset": Dataset.from_list(batch["examples"]),
        "processing_class": AutoTokenizer.from_pretrained(folder),
    }
    if batch["task"] == "dpo":
        settings = DPOConfig(**common, beta=BETA, precompute_ref_log_probs=True)
        return GivenIds(args=settings, **parts)
    return SFTTrainer(args=SFTConfig(**common), **parts)


def trl(batch: Mapping[str, Any], precision: str, passes: int, *, recompute: bool) -> None:
    """TRL's own training loop, held before each step until its turn."""
    from transformers import TrainerCallback

    trainer = trl_trainer(batch, precision, passes, recompute=recompute)
    taken: list[float] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not wait():
                raise SystemExit
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            taken.append(time.perf_counter() - self.began)

        def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
            facts = {"loss": logs["loss"], "norm": logs["grad_norm"]}
            answer({"step": taken.pop(), **facts, "peak_bytes": peak_bytes()})

    trainer.add_callback(Turns())
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sides = parser.add_subparsers(dest="side", required=True)
    made = sides.add_parser("batch")
    made.add_argument("task", choices=["dpo", "sft"])
    made.add_argument("--model", required=True)
    made.add_argument("--template", choices=["auto", "none"], default="auto")
    made.add_argument("--text", type=Path, required=True)
    made.add_argument("--sizes", type=json.loads, required=True)
    us, them = sides.add_parser("ours"), sides.add_parser("trl")
    us.add_argument("--precision", choices=list(OURS), required=True)
    them.add_argument("--precision", choices=list(TRL), required=True)
    them.add_argument("--passes", type=int, default=1)
    them.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    for side in (made, us, them):
        side.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.side == "batch":
        told = make_batch(
            options.task, options.model, options.template, options.text, options.sizes
        )
        options.file.write_text(json.dumps(told))
        answer({"written": str(options.file)})
        return
    batch = json.loads(options.file.read_text())
    if options.side == "ours":
        ours(batch, options.precision)
    else:
        trl(batch, options.precision, options.passes, recompute=options.recompute)


if __name__ == "__main__":
    main()
