"""The row that a step leaves in metrics.jsonl: names, units, and what is absent.

Owns the names: TRL's where TRL has one. A number that is not known is absent, never 0.
Refuses to own the numbers' sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.learner.batch import Batch
from surefoot.learner.update import Facts, UpdateReport
from surefoot.loops.credit import Credit
from surefoot.loops.keep import Gathered, raw_scores
from surefoot.loops.standing import Standing
from surefoot.objective import kl
from surefoot.objective.mismatch import mismatch
from surefoot.records import Group, StopReason

Metrics = dict[str, float | int | str | None]


def rollout_metrics(gathered: Gathered, *, prompts: int) -> Metrics:
    """Rewards and completions of everything sampled in the step, kept or not."""
    score_PG, valid_PG = raw_scores(gathered.seen)
    valid = score_PG[valid_PG]
    out: Metrics = {}
    if valid.numel():
        out["reward"] = float(valid.mean())
    if valid.numel() > 1:
        out["reward_std"] = float(valid.std())
    greedy = [g.greedy_score.value for g in gathered.seen if g.greedy_score is not None]
    known = [value for value in greedy if value is not None]
    if known:
        out["reward/greedy_mean"] = sum(known) / len(known)
    if greedy:
        out["reward/greedy_missing"] = len(greedy) - len(known)
    out.update(_completions(gathered.seen))
    if gathered.stale:
        out["completions/stale"] = gathered.stale
    out["groups/asked"] = len(gathered.seen)
    out["groups/kept"] = len(gathered.groups)
    out["groups/rounds"] = gathered.rounds
    out["groups/wanted"] = prompts
    return out


def _completions(groups: Sequence[Group]) -> Metrics:
    every = [c for group in groups for c in group.completions]
    lengths = [len(c.ids) for c in every]
    ended = [len(c.ids) for c in every if c.stop is StopReason.STOP]
    tokens = sum(lengths)
    # nan-safe: a token whose sampled log-probability is not finite is left out.
    logps = [value for c in every for value in c.logps if math.isfinite(value)]
    out: Metrics = {
        "completions/mean_length": tokens / len(every),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(c.stop is StopReason.LENGTH for c in every) / len(every),
    }
    if ended:
        out["completions/mean_terminated_length"] = sum(ended) / len(ended)
    if logps:
        out["entropy"] = -sum(logps) / len(logps)
    return out


def credit_metrics(standing: Standing, credit: Credit) -> Metrics:
    """Shares of groups without signal, and the size of the advantages."""
    whole_P = ~standing.dropped_P
    out: Metrics = {
        "groups/dropped": int(standing.dropped_P.sum()),
        "completions/absent": int((~standing.present_PG).sum()),
        **credit.trained_kl,
    }
    if bool(whole_P.any()):
        out["frac_reward_zero_std"] = float(credit.dead_P[whole_P].double().mean())
    if credit.history_P is not None and bool(whole_P.any()):
        out["baseline/history"] = float(credit.history_P[whole_P].mean())
    present = credit.advantage_PG[standing.present_PG]
    if present.numel():
        out["advantage/mean"] = float(present.mean())
        out["advantage/abs_max"] = float(present.abs().max())
    return out


def update_metrics(
    batch: Batch, standing: Standing, facts: Facts, report: UpdateReport, row: Any
) -> Metrics:
    """Loss, gradient, ratios, KL and the mismatch with the engine."""
    out: Metrics = {
        "optimizer_steps": report.steps,
        "skipped_steps": report.skipped,
        "forwarded_tokens": report.forwarded,
    }
    if report.steps:
        out["loss"] = report.loss
        out["grad_norm"] = report.grad_norm
    sums, count = report.sums, report.sums.get("tokens", 0.0)
    if count:
        out.update(_ratios(sums, count))
        if row.epochs == 1:
            # Counted over one pass of the data, so that it is a share of the sampled tokens.
            out["entropy_coverage"] = count / max(1.0, float(batch.mask_BT.sum()))
    if "kl_trained" in sums:
        out[f"kl/loss_{row.kl.estimator}_token"] = sums["kl_trained"] / count
    present_BT = batch.mask_BT & standing.present_PG.reshape(-1)[:, None]
    out.update(_reference_kl(facts, report, present_BT))
    out.update(_mismatch(batch, report))
    if batch.bad_logps:
        out["nonfinite_logps"] = batch.bad_logps
    return out


def _ratios(sums: Mapping[str, float], count: float) -> Metrics:
    out: Metrics = {
        "entropy_exact": sums["entropy"] / count,
        "ratio/mean": sums["ratio"] / count,
        "ratio/max": sums["ratio_max"],
        "ratio/clamped": int(sums["clamped"]),
    }
    if "clip_low" in sums:
        low, high, cap = (sums[f"clip_{side}"] / count for side in ("low", "high", "cap"))
        out["clip_ratio/low_mean"] = low
        out["clip_ratio/high_mean"] = high
        out["clip_ratio/region_mean"] = low + high
        out["clip_ratio/cap_mean"] = cap
    for name, said in (
        ("gate_dropped", "gate/dropped_mean"),
        ("correction", "correction/mean"),
        ("correction_dropped", "correction/dropped_mean"),
        ("stale", "stale/dropped_mean"),
    ):
        if name in sums:
            out[said] = sums[name] / count
    return out


def _reference_kl(facts: Facts, report: UpdateReport, present_BT: Tensor) -> Metrics:
    """`kl`: mean k3 to the reference per token, over the rows that the reference scored."""
    if facts.ref_logp_BT is None:
        return {}
    scored_B = torch.zeros(present_BT.shape[0], dtype=torch.bool)
    scored_B[list(facts.ref_rows)] = True
    mask_BT = present_BT & report.known_BT & scored_B[:, None]
    count = int(mask_BT.sum())
    if count == 0:
        return {}
    k3_BT = kl.k3(report.old_logp_BT, facts.ref_logp_BT, mask_BT=mask_BT)
    return {"kl": float(k3_BT.sum()) / count}


def _mismatch(batch: Batch, report: UpdateReport) -> Metrics:
    """Trainer against engine at rollout weights, over the tokens that the trainer scored."""
    mask_BT = batch.mask_BT & report.known_BT
    if not bool(mask_BT.any()):
        return {}
    found = mismatch(report.old_logp_BT, batch.sampled_logp_BT, mask_BT=mask_BT)
    gap_BT = torch.where(mask_BT, report.old_logp_BT - batch.sampled_logp_BT, 0.0)
    return {
        "mismatch/kl_k1": float(found.kl_k1),
        "mismatch/kl_k3": float(found.kl_k3),
        "mismatch/abs_mean": float(gap_BT.abs().sum()) / int(mask_BT.sum()),
        "mismatch/abs_max": float(gap_BT.abs().max()),
    }


def part_metrics(counts: Mapping[str, float]) -> Metrics:
    """The grader's own numbers, as they are."""
    return dict(counts)
