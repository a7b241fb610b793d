"""What supervised methods do with a batch: imitate demonstrations, or learn what people prefer.

Owns the passes of a step, its metrics and its evaluation, for SFT and for reward models.
Refuses to own the losses (`learner/supervised`), and when a step is taken (`offline`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.data import Demonstration, Pair, Ranking, pack
from surefoot.learner.answers import Answers, answer_passes
from surefoot.learner.batch import Packing
from surefoot.learner.critic import ValueModel
from surefoot.learner.descent import Descended, descend
from surefoot.learner.documents import Document, Line, document_passes
from surefoot.learner.layouts import Microbatch
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Scorer
from surefoot.learner.supervised import all_rewards, comparison_loss, nll_loss
from surefoot.loops.metrics import Metrics
from surefoot.loops.offline import Budgeted, Look
from surefoot.loops.state import trained_weights
from surefoot.methods import Supervised
from surefoot.objective import calibration, reward_model
from surefoot.run.read import Evaluation
from surefoot.statistics import clustered_share

_BINS = 10
_EVAL_BATCH = 32


class Imitation(Budgeted):
    """SFT: the likelihood of the trained tokens of demonstrations."""

    def __init__(
        self,
        row: Supervised,
        scorer: Scorer,
        optimizer: Optimizer,
        packing: Packing,
        held_out: Sequence[Demonstration],
    ) -> None:
        super().__init__(optimizer, packing)
        self.row = row
        self.scorer = scorer
        self.held_out = held_out

    def tokens(self, examples: Sequence[Demonstration]) -> int:
        return sum(example.length for example in examples)

    def learn(self, examples: Sequence[Demonstration], *, rate: float) -> tuple[Descended, Metrics]:
        passes = self._passes(examples)
        trained = sum(example.trained_tokens for example in examples)
        loss_of = nll_loss(self.scorer, tokens=trained)
        done = descend(self.optimizer, passes, loss_of, rate=rate, interrupt=self.interrupt)
        read = sum(example.length - 1 for example in examples)
        out: Metrics = {
            "entropy": done.sums["entropy"] / trained,
            "trained_tokens": trained,
            # Of the positions that were forwarded, those that hold a token.
            "packing_efficiency": read / max(1, done.forwarded),
        }
        return done, out

    def look(self, step: int) -> Look | None:
        """Mean -log p over all trained tokens of the held-out rows, and its exponential."""
        if not self.held_out:
            return None
        total = count = 0.0
        with torch.no_grad():
            for part in self._passes(self.held_out):
                self.interrupt()
                logp_N = self.scorer(part).logp_N
                total -= float(logp_N.double().sum())
                count += len(logp_N)
        loss = total / count
        # exp overflows before a loss of 710 nats, which no vocabulary has.
        metrics: Metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
        return Look(metrics)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return policy_tensors(self.scorer.model, self.optimizer)

    def _passes(self, examples: Sequence[Demonstration]) -> list[Microbatch]:
        documents = [Document(e.ids, e.trained, b) for b, e in enumerate(examples)]
        lines: list[Line] = [[document] for document in documents]
        if self.row.packing:
            longest = max(example.length for example in examples)
            lines = [
                [documents[source] for source in row.sources]
                for row in pack(examples, row_tokens=longest)
            ]
        return document_passes(lines, budget=self.packing.budget)


class Comparison(Budgeted):
    """A reward model: answers in their order of preference."""

    def __init__(
        self,
        row: Supervised,
        model: ValueModel,
        optimizer: Optimizer,
        packing: Packing,
        held_out: Sequence[Pair | Ranking],
        known: Sequence[Pair | Ranking],
    ) -> None:
        """`known` are the reference answers that a normalised model has mean 0 and std 1 on."""
        super().__init__(optimizer, packing)
        self.row = row
        self.known = known
        self.model = model
        self.held_out = held_out

    def tokens(self, examples: Sequence[Pair | Ranking]) -> int:
        return sum(len(e.prompt) + e.trained_tokens for e in examples)

    def learn(
        self, examples: Sequence[Pair | Ranking], *, rate: float
    ) -> tuple[Descended, Metrics]:
        batch = compared_answers(examples)
        passes = answer_passes(batch, self.packing, after=True)
        margins = [e.margin or 0.0 if isinstance(e, Pair) else 0.0 for e in examples]
        margin_P = torch.tensor(margins, dtype=torch.float64)
        loss_of = comparison_loss(self.row, self.model, batch, margin_P=margin_P)
        done = descend(self.optimizer, passes, loss_of, rate=rate, interrupt=self.interrupt)
        sums = done.sums
        mean = sums["reward"] / sums["answers"]
        spread = max(0.0, sums["reward_square"] / sums["answers"] - mean**2)
        out: Metrics = {
            "accuracy": sums["right"] / max(1.0, sums["compared"]),
            "mean_reward": mean,
            "reward_std": math.sqrt(spread),
        }
        if "margin" in sums:
            out["margin"] = sums["margin"] / sums["compared"]
        return done, out

    def look(self, step: int) -> Look | None:
        """The held-out comparisons: how many are in order, how sure, and whether length decides."""
        if not self.held_out:
            return None
        margins: list[float] = []
        lengths: list[float] = []
        names: list[str] = []
        prompts: list[tuple[int, ...]] = []
        for start in range(0, len(self.held_out), _EVAL_BATCH):
            self.interrupt()
            some = self.held_out[start : start + _EVAL_BATCH]
            batch = compared_answers(some)
            passes = answer_passes(batch, self.packing, after=True)
            reward_B = all_rewards(self.model, batch, passes)
            for example, first in zip(some, batch.first_P, strict=True):
                own = answers_of(example)
                for i in range(len(own)):
                    for j in range(i + 1, len(own)):
                        margins.append(float(reward_B[first + i] - reward_B[first + j]))
                        lengths.append(float(len(own[i]) - len(own[j])))
                        names.append(example.id if len(own) == 2 else f"{example.id}/{i}>{j}")
                        prompts.append(example.prompt)
        return compared_look(step, margins, lengths, names, prompts)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        own = trained_weights(self.model)
        moments = self.optimizer.state()
        out = {"reward_model": own, **({"optimizer": moments} if moments else {})}
        if self.row.normalize:
            out["normalization"] = self._normalization()
        return out

    def _normalization(self) -> dict[str, Tensor]:
        """Gain and bias for mean 0 and std 1 on the reference answers; 1 and 0 without spread."""
        scores: list[Tensor] = []
        for start in range(0, len(self.known), _EVAL_BATCH):
            batch = compared_answers(self.known[start : start + _EVAL_BATCH])
            passes = answer_passes(batch, self.packing, after=True)
            scores.append(all_rewards(self.model, batch, passes))
        score_N = torch.cat(scores)
        if not bool(score_N.max() > score_N.min()):
            return {"gain": torch.ones(1), "bias": torch.zeros(1)}
        found = reward_model.normalization(score_N, valid_N=score_N.isfinite(), mean=0.0, std=1.0)
        return {"gain": found.gain.reshape(1), "bias": found.bias.reshape(1)}


def answers_of(example: Pair | Ranking) -> tuple[tuple[int, ...], ...]:
    """The answers of a comparison, the best first."""
    if isinstance(example, Pair):
        return example.chosen, example.rejected
    return example.completions


def compared_answers(examples: Sequence[Pair | Ranking]) -> Answers:
    return Answers(tuple(e.prompt for e in examples), tuple(answers_of(e) for e in examples))


def compared_look(
    step: int,
    margins: Sequence[float],
    lengths: Sequence[float],
    names: Sequence[str],
    prompts: Sequence[tuple[int, ...]],
) -> Look:
    """Accuracy, calibration and length bias of held-out margins (rewards, chosen less rejected).

    Comparisons of one prompt count as a cluster in the limits of the accuracy.
    """
    margin_N = torch.tensor(margins, dtype=torch.float64)
    length_N = torch.tensor(lengths, dtype=torch.float64)
    valid_N = margin_N.isfinite()
    right_N = margin_N > 0
    found = {
        "eval/margin": margin_N[valid_N].mean(),
        "eval/calibration_error": calibration.expected_calibration_error(
            margin_N, valid_N=valid_N, bins=_BINS
        ),
        "eval/length_correlation": calibration.length_correlation(
            margin_N, length_N, valid_N=valid_N, kind="spearman"
        ),
        # What the rule "the longer answer is better" would have got.
        "eval/accuracy_of_length": (length_N > 0).double().mean(),
    }
    metrics: Metrics = {name: float(x) for name, x in found.items() if bool(x.isfinite())}
    rows = [
        {"split": "eval", "prompt": name, "correct": bool(right), "margin": float(margin)}
        for name, right, margin in zip(names, right_N, margin_N, strict=True)
    ]
    clusters: dict[tuple[int, ...], list[bool]] = {}
    for prompt, right in zip(prompts, right_N.tolist(), strict=True):
        clusters.setdefault(prompt, []).append(right)
    share = clustered_share(
        [sum(c) for c in clusters.values()], [len(c) for c in clusters.values()]
    )
    accuracy = Evaluation.of(
        step,
        n=len(margins),
        correct=int(right_N.sum()),
        limits=(share.low, share.high),
    )
    return Look(metrics, accuracy, rows)


def policy_tensors(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """The trainable weights and the optimizer's moments, by file of a checkpoint."""
    moments = optimizer.state()
    return {"policy": trained_weights(model), **({"optimizer": moments} if moments else {})}
