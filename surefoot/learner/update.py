"""How weights change: scoring under old weights and reference, and the optimizer steps of a step.

Owns the passes over a plan, the global denominators, and the refusal of non-finite steps.
Refuses to own which completions are good (`loops/credit`) and how they were sampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.learner.batch import (
    Batch,
    Microbatch,
    Minibatch,
    Packing,
    Plan,
    laid_again,
    make_plan,
    scatter,
)
from surefoot.learner.critic import Critic, Targets
from surefoot.learner.loss import LossInputs, microbatch_loss
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Scorer
from surefoot.learner.tally import Tally, UpdateReport
from surefoot.methods import Method
from surefoot.models.memory import halved, out_of_memory
from surefoot.objective import reduce


@dataclass(frozen=True)
class Facts:
    """Log-probabilities [B, T] (float64, 0 where not scored) that the row needs; None if not."""

    old_logp_BT: Tensor | None = None
    ref_logp_BT: Tensor | None = None
    ref_rows: tuple[int, ...] = ()
    """Rows that the reference scored."""
    value_BT: Tensor | None = None
    """The critic's, in units of reward."""
    bootstrap_B: Tensor | None = None
    """The critic's after the last token of completions that were cut off, 0 elsewhere."""


@dataclass(frozen=True)
class Signal:
    """What credit assignment hands to the update, [B, T] or [B]."""

    advantage_BT: Tensor
    present_B: Tensor
    """False: in no numerator and no denominator (missing score, masked truncation)."""
    return_BT: Tensor | None = None
    """What the critic is to foresee."""
    correct_B: Tensor | None = None
    """Completions that are right by their raw score, for a likelihood term."""


class Learner:
    """The policy being trained, its optimizer, and the frozen reference if the row needs one."""

    def __init__(
        self,
        scorer: Scorer,
        optimizer: Optimizer,
        row: Method,
        *,
        reference: Scorer | None,
        packing: Packing,
        constant: float,
        seed: int,
        critic: Critic | None = None,
    ) -> None:
        self.scorer = scorer
        self.optimizer = optimizer
        self.row = row
        self.reference = reference
        self.critic = critic
        """None also for a row whose critic is made later."""
        self.packing = packing
        self.constant = constant
        """Divisor of the constant reduction, in tokens."""
        self.seed = seed
        self.touched = False
        """Whether the current update has begun to change weights."""
        self.interrupt: Callable[[], None] = lambda: None
        """Called between passes while nothing is lost by it; raises to abandon the step."""

    @property
    def single_step(self) -> bool:
        """One optimizer step per rollout, so the first forward is the old log-probability."""
        return self.row.epochs * self.row.minibatches == 1

    def plan(self, batch: Batch, forwarded_B: Tensor, *, step: int) -> Plan:
        """Lay the forwarded rows out once for all passes of this step."""
        return make_plan(
            batch,
            forwarded_B=forwarded_B,
            minibatches=self.row.minibatches,
            packing=self._packing(),
            seed=self.seed,
            step=step,
        )

    def _packing(self) -> Packing:
        """In layouts that are right for the critic too: both take the same passes."""
        if self.critic is None:
            return self.packing
        right = self.critic.layouts
        layouts = tuple(name for name in self.packing.layouts if name in right)
        return dataclasses.replace(self.packing, layouts=layouts)

    def score(self, batch: Batch, plan: Plan, *, old: bool, reference: bool) -> Facts:
        """Score the plan's passes without gradient: policy, reference, and the critic if any."""
        passes = plan.passes
        rows = tuple(sorted(row for part in passes for row in part.row_list))
        old_BT, value_BT = self._no_grad(self.scorer, batch, passes) if old else (None, None)
        if self.critic is not None and value_BT is None:
            value_BT = self.critic.values(batch.mask_BT, passes)
        return Facts(
            old_BT,
            self._no_grad(self._need_reference(), batch, passes)[0] if reference else None,
            rows if reference else (),
            value_BT,
        )

    def bootstrap(self, batch: Batch, cut_B: Tensor) -> Tensor:
        """The critic's value of the state after the last sampled token where `cut_B`; float64 [B].

        0 elsewhere. A pass of its own over those completions, without gradient.
        """
        assert self.critic is not None
        return self.critic.after(batch, cut_B, self._packing())

    def measure(self, batch: Batch, part: Microbatch) -> Facts:
        """Score one micro-batch under the reference, for a KL that is only reported."""
        scored, _ = self._no_grad(self._need_reference(), batch, [part])
        return Facts(ref_logp_BT=scored, ref_rows=tuple(part.row_list))

    def _need_reference(self) -> Scorer:
        assert self.reference is not None, "this row keeps no reference"
        return self.reference

    def _no_grad(
        self, scorer: Scorer, batch: Batch, passes: Sequence[Microbatch]
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities, and values where a critic shares the trunk: one forward for both."""
        out_BT = torch.zeros_like(batch.sampled_logp_BT)
        value_BT = None if scorer.value_head is None else torch.zeros_like(out_BT)
        with torch.no_grad():
            for part in passes:
                self.interrupt()
                scored = scorer(part)
                out_BT[part.rows_N, part.columns_N] = scored.logp_N.double().cpu()
                if value_BT is not None:
                    assert scored.value_N is not None
                    value_BT[part.rows_N, part.columns_N] = scored.value_N.double().cpu()
        return out_BT, value_BT

    def clear(self) -> None:
        """Drop the gradients of a step that is not to be taken."""
        self.optimizer.clear()
        if self.critic is not None:
            self.critic.optimizer.clear()

    def update(
        self,
        batch: Batch,
        plan: Plan,
        signal: Signal,
        facts: Facts,
        *,
        step: int,
        warming: bool = False,
    ) -> UpdateReport:
        """Take epochs x minibatches optimizer steps; each has its own global denominators.

        One that runs out of memory is done again in smaller pieces (see `halve`).
        `warming`: the critic alone, under a policy that stays what it is.
        """
        tally = Tally(batch, facts.old_logp_BT, plan.passes)
        self.touched = False
        rate = self.optimizer.rate(step)
        laid = list(plan.minibatches)
        for epoch in range(self.row.epochs):
            for index, minibatch in enumerate(laid):
                if not minibatch.passes:
                    continue
                first = epoch == 0
                while True:
                    mark = tally.mark()
                    try:
                        found = self._gradients(
                            batch, minibatch, signal, facts, tally, first=first, warming=warming
                        )
                        break
                    except (MemoryError, RuntimeError) as error:
                        # Untouched, the whole step is redone, its old log-probabilities too.
                        if not (self.touched and out_of_memory(error) and self.halve()):
                            raise
                    self.clear()
                    tally.back(mark)
                    laid[:] = [laid_again(batch, each, self._packing()) for each in laid]
                    minibatch = laid[index]
                loss, norm, value_norm = found
                if math.isfinite(loss) and math.isfinite(norm) and math.isfinite(value_norm):
                    self._may_stop()
                    self.touched = True
                    if not warming:
                        self.optimizer.step(rate=rate, norm=norm)
                    if self.critic is not None:
                        own = self.critic.optimizer
                        own.step(rate=own.rate(step), norm=value_norm)
                    tally.applied(loss, norm)
                else:
                    tally.refused(minibatch)
                self.clear()
        return tally.report()

    def _gradients(
        self,
        batch: Batch,
        minibatch: Minibatch,
        signal: Signal,
        facts: Facts,
        tally: Tally,
        *,
        first: bool,
        warming: bool,
    ) -> tuple[float, float, float]:
        """Add up the gradients of one minibatch; its loss, and the norms of policy and critic."""
        loss = norm = 0.0
        if not warming:
            loss = self._accumulate(batch, minibatch, signal, facts, tally, first=first)
            norm = self.optimizer.gradient_norm()
        value_norm = self._regress(batch, minibatch, signal, facts, tally, warming=warming)
        return loss, norm, value_norm

    def _regress(
        self,
        batch: Batch,
        minibatch: Minibatch,
        signal: Signal,
        facts: Facts,
        tally: Tally,
        *,
        warming: bool,
    ) -> float:
        """Add up the critic's gradient over the minibatch; returns its norm, 0 without a critic.

        On a shared trunk the policy's passes have done so, unless the head is warmed alone.
        """
        if self.critic is None:
            return 0.0
        if warming or not self.critic.shares_trunk:
            targets = _targets(batch, minibatch, signal, facts)
            for part in minibatch.passes:
                self._may_stop()
                tally.add_sums(self.critic.accumulate(part, targets))
        norm = self.critic.optimizer.gradient_norm()
        tally.add_sums({"value_norm": norm, "value_steps": 1.0})
        return norm

    def _accumulate(
        self,
        batch: Batch,
        minibatch: Minibatch,
        signal: Signal,
        facts: Facts,
        tally: Tally,
        *,
        first: bool,
    ) -> float:
        """Add up the gradient of one minibatch; returns the policy's loss."""
        shared = None
        if self.critic is not None and self.critic.shares_trunk:
            shared = _targets(batch, minibatch, signal, facts)
        weight_BT = self._weights(batch, minibatch, signal)
        imitated_BT = self._imitated(batch, minibatch, signal)
        total = 0.0
        for part in minibatch.passes:
            self._may_stop()
            rows = part.row_list
            width = batch.mask_BT.shape[1]
            scored = self.scorer(part)
            logp_BT = scatter(scored.logp_N, part, rows=rows, width=width)
            entropy_BT = scatter(scored.entropy_N, part, rows=rows, width=width)
            old_BT = logp_BT.detach()
            if facts.old_logp_BT is not None:
                old_BT = facts.old_logp_BT[rows].to(logp_BT)
            elif first:
                tally.first_forward(part, scored.logp_N)
            device = logp_BT.device
            ref_BT = None
            if facts.ref_logp_BT is not None and set(rows) <= set(facts.ref_rows):
                ref_BT = facts.ref_logp_BT[rows].to(device)
            inputs = LossInputs(
                logp_BT,
                entropy_BT,
                old_BT,
                batch.sampled_logp_BT[rows].to(logp_BT),
                ref_BT,
                signal.advantage_BT[rows].to(device),
                (batch.mask_BT & signal.present_B[:, None])[rows].to(device),
                weight_BT[rows].to(device),
                None if imitated_BT is None else imitated_BT[rows].to(device),
            )
            out = microbatch_loss(inputs, self.row)
            loss = out.loss
            if shared is not None:
                assert self.critic is not None and scored.value_N is not None
                regression, sums = self.critic.loss(scored.value_N, part, shared)
                loss = loss + regression
                tally.add_sums(sums)
            loss.backward()
            total += float(out.loss.detach())
            tally.add(part, out.sums)
        return total

    def _may_stop(self) -> None:
        """A step that has begun to change weights is taken to its end."""
        if not self.touched:
            self.interrupt()

    def _imitated(self, batch: Batch, minibatch: Minibatch, signal: Signal) -> Tensor | None:
        """Token weights of the right completions: a mean over the tokens of them all."""
        if all(term.kind != "positive_nll" for term in self.row.terms):
            return None
        assert signal.correct_B is not None
        right_BT = batch.mask_BT & (_counted(minibatch, signal) & signal.correct_B)[:, None]
        return right_BT.double() / right_BT.sum().clamp_min(1)

    def _weights(self, batch: Batch, minibatch: Minibatch, signal: Signal) -> Tensor:
        """Token weights of the whole batch under the denominators of one optimizer step."""
        present_B = _counted(minibatch, signal)
        length_B = reduce.lengths(batch.mask_BT)
        kind = self.row.reduce.kind
        bottom = reduce.denominator(
            kind,
            length_B=length_B,
            present_B=present_B,
            group_B=batch.group_B,
            constant=self.constant,
        )
        grouped_B = reduce.group_lengths(length_B, present_B=present_B, group_B=batch.group_B)
        return reduce.token_weights(
            kind,
            mask_BT=batch.mask_BT,
            present_B=present_B,
            denominator=bottom,
            group_length_B=grouped_B,
        )

    def limit(self, budget: int) -> None:
        """Lower the token budget to what an earlier process of this run had come down to."""
        if 0 < budget < self.packing.budget:
            self.packing = dataclasses.replace(self.packing, budget=budget)

    def halve(self) -> bool:
        """After running out of memory: half the token budget; False if it cannot get smaller."""
        budget = halved(self.packing.budget)
        if budget is None:
            return False
        self.packing = dataclasses.replace(self.packing, budget=budget)
        return True


def _targets(batch: Batch, minibatch: Minibatch, signal: Signal, facts: Facts) -> Targets:
    """What the critic regresses on in one optimizer step.

    Every trained token counts once, whatever the policy's reduction.
    """
    assert signal.return_BT is not None and facts.value_BT is not None
    mask_BT = batch.mask_BT & _counted(minibatch, signal)[:, None]
    return Targets(facts.value_BT, signal.return_BT, mask_BT, int(mask_BT.sum()))


def _counted(minibatch: Minibatch, signal: Signal) -> Tensor:
    """Completions in the denominators of one optimizer step, [B]."""
    inside_B = torch.zeros_like(signal.present_B)
    inside_B[list(minibatch.rows)] = True
    return signal.present_B & inside_B
