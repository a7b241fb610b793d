"""The built-in reward `judge`: what a language model behind an HTTP server says of an answer.

Owns its options, its three modes (rubric, reference, pairwise), and what a verdict is worth.
Refuses to own asking (`judge_panel.py`), transport and money (`judge_http.py`, `judge_budget.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from surefoot.recipe.schema import Judge
from surefoot.records import ScoreStatus
from surefoot.reward.cache import ScoreCache
from surefoot.reward.contract import PartScore, RewardSample, failed, scored, unscorable
from surefoot.reward.judge_budget import Budget, Spent
from surefoot.reward.judge_http import Endpoint
from surefoot.reward.judge_pairs import TIE, Pair, pairs_of, settled, win_rates
from surefoot.reward.judge_panel import Counts, NoVerdict, Panel, Question, Verdict, rates
from surefoot.reward.judge_prompts import (
    EQUIVALENT_FORM,
    WINNER_FORM,
    pair_messages,
    question_of,
    reference_messages,
    score_form,
    score_messages,
)
from surefoot.reward.judge_verdict import read_score, read_word

_SCALE = (0.0, 10.0)
_OPPONENTS = 4
_NO_ANSWER = "the row has no answer to compare with"


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """`rubric` says what is good; in mode reference it only adds rules.

    `scale` (default [0, 10]) and `with_answer` (show the row's answer beside the completion) are of
    mode rubric, `opponents` (default 4, even) of mode pairwise.
    """

    mode: Literal["rubric", "reference", "pairwise"] = "rubric"
    rubric: str = ""
    scale: tuple[float, ...] | None = None
    with_answer: bool | None = None
    opponents: int | None = None

    def __post_init__(self) -> None:
        own = {"scale": "rubric", "with_answer": "rubric", "opponents": "pairwise"}
        values = {
            "scale": self.scale,
            "with_answer": self.with_answer,
            "opponents": self.opponents,
        }
        for name, mode in own.items():
            if values[name] is not None and self.mode != mode:
                raise ValueError(f"{name} is read in mode {mode} only, and the mode is {self.mode}")
        if not self.rubric.strip() and self.mode != "reference":
            raise ValueError("rubric is empty; say in words what makes an answer good")
        if self.scale is not None and (len(self.scale) != 2 or self.scale[0] >= self.scale[1]):
            raise ValueError(f"scale is {list(self.scale)}; it is [worst, best], as in [0, 10]")
        if self.opponents is not None and (self.opponents < 2 or self.opponents % 2):
            raise ValueError(
                f"opponents is {self.opponents}; it is an even number from 2 on, because each "
                "answer meets as many on either side"
            )


@dataclass(frozen=True, slots=True)
class JudgeSetup:
    """What judges of a run share: the recipe's `judge`, and what outlives the process.

    `spent` is what earlier processes of the run have paid, and `keep` is told each new count.
    """

    settings: Judge
    seed: int = 0
    cache: ScoreCache | None = None
    spent: Spent | None = None
    keep: Callable[[Spent], None] | None = None


class Judges:
    """The one server, cache and budget behind every judge reward of a run."""

    def __init__(self, setup: JudgeSetup) -> None:
        self.setup = setup
        settings = setup.settings
        self.budget = Budget(
            limit_calls=settings.budget_calls,
            limit_usd=settings.budget_usd,
            spent=setup.spent,
            keep=setup.keep,
        )
        self.panel = Panel(Endpoint(settings, self.budget, seed=setup.seed), setup.cache)

    @property
    def spent(self) -> Spent:
        """What the run has paid so far, earlier processes included."""
        return self.budget.spent

    def close(self) -> None:
        self.panel.endpoint.close()

    def totals(self) -> dict[str, float]:
        """The run's cost as metrics; dollars only where the recipe has a price."""
        spent, settings = self.spent, self.setup.settings
        out = {"judge/calls": float(spent.calls)}
        if (settings.price_per_million_input, settings.price_per_million_output) != (None, None):
            out["judge/usd"] = spent.usd
        return out


class JudgeReward:
    """Scores samples by asking the judge. Safe to call in any thread."""

    def __init__(self, options: JudgeOptions, *, name: str, judges: Judges) -> None:
        self.options = options
        self.name = name
        self.judges = judges
        self.counts = Counts()
        self.low, self.high = _SCALE if options.scale is None else options.scale

    def begin(self) -> None:
        """Forget the counts of the step before."""
        self.counts.clear()

    def metrics(self) -> dict[str, float]:
        """The counts since `begin`, and what the run has paid."""
        own = {f"rewards/{self.name}/{key}": value for key, value in rates(self.counts).items()}
        return own | self.judges.totals()

    def __call__(self, samples: Sequence[RewardSample]) -> list[PartScore]:
        if self.options.mode == "pairwise":
            return self._compared(samples)
        verdicts: list[PartScore | None] = [None] * len(samples)
        places, questions = [], []
        for place, sample in enumerate(samples):
            question = self._question(sample)
            if isinstance(question, PartScore):
                verdicts[place] = question
            else:
                places.append(place)
                questions.append(question)
        said = self.judges.panel.verdicts(questions, self.counts)
        for place, verdict in zip(places, said, strict=True):
            verdicts[place] = self._worth(verdict)
        return [verdict for verdict in verdicts if verdict is not None]

    def _question(self, sample: RewardSample) -> Question | PartScore:
        """One completion's, or the verdict that needs no judge."""
        options, answer = self.options, sample.answer
        needs_answer = options.mode == "reference" or bool(options.with_answer)
        if needs_answer and (answer is None or not answer.strip()):
            return unscorable(_NO_ANSWER)
        if options.mode == "reference":
            assert answer is not None
            return Question(
                reference_messages(sample, rubric=options.rubric, answer=answer),
                EQUIVALENT_FORM,
                partial(read_word, key="equivalent", words=("yes", "no")),
            )
        return Question(
            score_messages(
                sample,
                rubric=options.rubric,
                low=self.low,
                high=self.high,
                answer=answer if options.with_answer else None,
            ),
            score_form(self.low, self.high),
            partial(read_score, low=self.low, high=self.high),
        )

    def _worth(self, verdict: Verdict | NoVerdict) -> PartScore:
        if isinstance(verdict, NoVerdict):
            return failed(verdict.why)
        if isinstance(verdict, str):
            return scored(float(verdict == "yes"), f"equivalent: {verdict}")
        value = (verdict - self.low) / (self.high - self.low)
        return scored(value, f"{verdict:g} of [{self.low:g}, {self.high:g}]")

    def _compared(self, samples: Sequence[RewardSample]) -> list[PartScore]:
        """All answers to one prompt against each other, and nobody else."""
        groups: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            groups.setdefault(_row_of(sample), []).append(place)
        opponents = self.options.opponents or _OPPONENTS
        asked: list[tuple[tuple[int, ...], Pair]] = []
        worth: dict[tuple[int, ...], dict[Pair, float]] = {}
        for places in map(tuple, groups.values()):
            worth[places] = {}
            texts = [samples[place].text for place in places]
            prompt = question_of(samples[places[0]])
            seed = self.judges.setup.seed
            for i, j in pairs_of(texts, opponents=opponents, seed=seed, prompt=prompt):
                if texts[i] == texts[j]:
                    worth[places][i, j] = 0.5
                else:
                    asked.append((places, (i, j)))
        why = self._ask_pairs(samples, asked, worth)
        verdicts: dict[int, PartScore] = {}
        for places, results in worth.items():
            for place, rate in zip(places, win_rates(len(places), results), strict=True):
                verdicts[place] = _rated(rate, alone=len(places) == 1, why=why)
        return [verdicts[place] for place in range(len(samples))]

    def _ask_pairs(
        self,
        samples: Sequence[RewardSample],
        asked: Sequence[tuple[tuple[int, ...], Pair]],
        worth: dict[tuple[int, ...], dict[Pair, float]],
    ) -> str:
        """Put the worth of each pair that has both verdicts into `worth`; why others have none."""
        questions = []
        for places, (i, j) in asked:
            first, second = samples[places[i]], samples[places[j]]
            questions += [self._pair(first, second), self._pair(second, first)]
        said = self.judges.panel.verdicts(questions, self.counts)
        why = ""
        for k, (places, pair) in enumerate(asked):
            first, swapped = said[2 * k], said[2 * k + 1]
            if isinstance(first, str) and isinstance(swapped, str):
                worth[places][pair], flipped = settled(first, swapped)
                self.counts.pairs += 1
                self.counts.flips += flipped
            else:
                lost = first if isinstance(first, NoVerdict) else swapped
                assert isinstance(lost, NoVerdict), lost
                why = why or lost.why
        return why

    def _pair(self, first: RewardSample, second: RewardSample) -> Question:
        return Question(
            pair_messages(first, first.text, second.text, rubric=self.options.rubric),
            WINNER_FORM,
            partial(read_word, key="winner", words=("A", "B", TIE)),
        )


def _rated(rate: tuple[float, int] | None, *, alone: bool, why: str) -> PartScore:
    if rate is not None:
        return scored(rate[0], f"win rate over {rate[1]} comparisons")
    # One answer has nobody to be compared with, which is nobody's fault.
    if alone:
        return PartScore(ScoreStatus.SCORED)
    return failed(f"no comparison has a verdict: {why}")


def _row_of(sample: RewardSample) -> str:
    """What completions of one prompt have in common."""
    row = [sample.prompt, sample.messages, sample.answer, sample.task, sample.columns]
    return json.dumps(row, sort_keys=True, default=repr)
