"""A GRPO script as it is written for TRL: the reward, the dataset and the names are TRL's.

Three places differ, and each says what stood there. Needs the package `datasets`.

    python examples/trl_script.py
"""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset

import surefoot  # was: from trl import GRPOConfig, GRPOTrainer


def accuracy_reward(completions, solution, **kwargs):
    """1 for each completion that says the solution, else 0."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(gold in content) for content, gold in zip(contents, solution, strict=True)]


def brevity_reward(completions, **kwargs):
    """Up to 0.5 for short completions."""
    return [0.5 / (1 + len(completion[0]["content"]) / 20) for completion in completions]


def make_dataset() -> Dataset:
    sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"What is {a} + {b}? Say the number only."}],
                "solution": str(a + b),
            }
            for a, b in sums
        ]
    )


def main(model: str = "smollm2-135m", overrides: Sequence[str] = ()) -> surefoot.Run:
    training_args = dict(  # was: GRPOConfig(  # noqa: C408
        output_dir="runs/trl_script",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        num_generations=8,
        max_completion_length=24,
        max_steps=20,
        beta=0.0,
        loss_type="dapo",
        save_steps=10,
        seed=42,
        report_to="none",
    )
    # was: trainer = GRPOTrainer(model=model, reward_funcs=[...], args=training_args,
    #                            train_dataset=make_dataset()); trainer.train()
    return surefoot.train(
        {**training_args, "method": "grpo"},
        overrides,
        rewards=[accuracy_reward, brevity_reward],
        data=make_dataset(),
        model=model,
    )


if __name__ == "__main__":
    run = main()
    print(f"reward {run.metrics[0]['reward']:.2f} -> {run.metrics[-1]['reward']:.2f}")
