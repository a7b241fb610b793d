"""Flipped labels: the share estimated, the suspects, and what is not claimed.

The bars are those of the issue, on made pairs whose better answer is known; more seeds, and real
pairs, are in bench/results/audit_flips.txt.
"""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.preferences import MadePair, made_pairs

from surefoot.audit import flips
from surefoot.audit.data import DataOptions, audit_data
from surefoot.audit.features import Compared, records, shapes, words
from surefoot.audit.scorer import logistic
from surefoot.errors import SurefootError
from surefoot.statistics import Interval


def compared(pairs: Sequence[MadePair]) -> list[Compared]:
    rows = [pair.row for pair in pairs]
    return [
        Compared(row["prompt"], row["prompt"].encode(), row["chosen"], row["rejected"])
        for row in rows
    ]


@pytest.mark.parametrize(
    ("share", "count", "kept_at_most"),
    [
        (0.0, 1500, 1.0),
        (0.1, 2000, 2 / 3),
        (0.2, 3000, 2 / 3),
        pytest.param(0.4, 8000, 0.95, marks=pytest.mark.slow),
    ],
)
def test_the_bars_on_made_pairs(share: float, count: int, kept_at_most: float) -> None:
    pairs = made_pairs(count, flipped=share, seed=0)
    flipped = np.array([pair.flipped for pair in pairs])
    found = flips.find(compared(pairs))
    assert found.rate is not None, found.weak
    assert found.rate.estimate == pytest.approx(flipped.mean(), abs=0.07)
    assert found.rate.low <= flipped.mean() + 0.01
    kept = np.ones(count, dtype=bool)
    kept[found.suspects()] = False
    assert (~kept & ~flipped).sum() < 0.05 * (~flipped).sum()
    assert flipped[kept].mean() <= kept_at_most * flipped.mean()


def test_the_cleaned_file_has_fewer_flipped_labels(tmp_path: Path) -> None:
    pairs = made_pairs(1500, flipped=0.1, seed=1)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(pair.row) + "\n" for pair in pairs), encoding="utf-8")
    audit = audit_data(source, DataOptions(fix=out))
    kept = {json.loads(line)["id"] for line in out.read_text(encoding="utf-8").splitlines()}
    still = [pair.flipped for pair in pairs if pair.row["id"] in kept]
    before = sum(pair.flipped for pair in pairs) / len(pairs)
    assert sum(still) / len(still) < 2 / 3 * before
    assert audit.report.verdict == "go with changes"
    listed = [
        json.loads(line)
        for line in Path(f"{out}.removed.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {row["check"] for row in listed} == {"flipped labels"}
    assert all(row["figures"]["probability"] >= 1 / 3 for row in listed)
    assert len(listed) + len(kept) == len(pairs)


def test_noise_has_no_rate() -> None:
    random = np.random.default_rng(0)
    sure = random.normal(size=600)
    found = flips.judged(sure, np.arange(600), seed=0)
    assert found.rate is None
    assert "no more than chance" in found.weak
    assert len(found.suspects()) == 0
    # A scorer that is right on 60 % and equally unsure of every pair: any share would fit.
    equal = np.where(random.random(2000) < 0.6, 1.0, -1.0)
    found = flips.judged(equal, np.arange(2000), seed=0)
    assert found.rate is None
    assert "any share" in found.weak


def test_a_few_prompts_are_too_few() -> None:
    found = flips.find(compared(made_pairs(flips.FEWEST - 1, flipped=0.0, seed=0)))
    assert found.rate is None
    assert "too few" in found.weak


def test_the_share_is_read_off_the_sure_pairs() -> None:
    # A quarter disagrees at a margin of 30 and at one of 15 alike, so a half of it is sure already.
    margins = np.concatenate([np.full(1500, 1.0), np.full(500, -1.0)])
    margins = np.concatenate([30 * margins, 15 * margins])
    rate, scale = flips.estimated(margins, np.arange(4000), seed=0)
    assert rate.estimate == pytest.approx(0.25, abs=0.011)
    assert rate.high - rate.low < 0.15
    assert scale * 15 > 3


def test_prompts_are_drawn_whole() -> None:
    margins = np.tile([30.0, 30.0, 30.0, -30.0], 100)
    alone, _ = flips.estimated(margins, np.arange(400), seed=0)
    by_four = np.repeat(np.arange(100), 4)
    together, _ = flips.estimated(margins, by_four, seed=0)
    # Every prompt has one of four against: drawn whole, nothing varies.
    assert together.low == together.high == together.estimate == alone.estimate
    assert alone.low < alone.estimate < alone.high


def test_probability_by_hand() -> None:
    # e = 1/4 and a margin of log 3: (1/4 * 1/4) / (1/4 * 1/4 + 3/4 * 3/4) = 1/10.
    assert flips.probability(np.array([math.log(3.0)]), 0.25, 1.0)[0] == pytest.approx(0.1)
    assert flips.probability(np.array([0.0]), 0.25, 1.0)[0] == pytest.approx(0.25)
    assert flips.probability(np.array([-9.0]), 0.0, 1.0)[0] == 0.0


def test_suspects_cost_a_share_of_the_clean_pairs() -> None:
    probabilities = np.array([0.9] * 10 + [0.5] * 10 + [0.0] * 80)
    rate = Interval(0.1, 0.05, 0.1)
    found = flips.Flips(Interval(0.8, 0.7, 0.9), rate, "", np.zeros(100), probabilities)
    # 86 clean pairs are expected, 0.025 * 0.8 of them are 1.72: ten at 0.1, then one at 0.5.
    assert found.suspects().tolist() == list(range(11))


def test_features_change_sign_with_the_sides() -> None:
    pairs = compared(made_pairs(20, flipped=0.0, seed=0, per_prompt=4))
    turned = [Compared(pair.prompt, pair.key, pair.rejected, pair.chosen) for pair in pairs]
    assert abs(words(pairs) + words(turned)).max() == 0
    assert np.array_equal(shapes(pairs), -shapes(turned))


def test_a_record_leaves_the_pair_itself_out() -> None:
    def pair(chosen: str, rejected: str, key: bytes = b"p") -> Compared:
        return Compared("p", key, chosen, rejected)

    assert records([pair("A", "B")]).tolist() == [[0.0]]
    # A won once elsewhere: 1 / 2. B has no other pair, C none.
    assert records([pair("A", "B"), pair("A", "C")]).tolist() == [[0.5], [0.5]]
    # The first label turned: B has none, A one win elsewhere, and it is on the other side.
    assert records([pair("B", "A"), pair("A", "C")]).tolist() == [[-0.5], [-0.5]]
    # Other prompts say nothing.
    assert records([pair("A", "B"), pair("A", "C", b"q")]).tolist() == [[0.0], [0.0]]


def test_the_loss_of_wrong_labels_has_its_own_optimum() -> None:
    # 80 rows of +1 and 20 of -1: s(w) = 0.8 without wrong labels; of which a tenth are wrong,
    # 0.9 s + 0.1 (1 - s) = 0.8, so s = 0.875.
    rows = np.concatenate([np.ones((80, 1)), -np.ones((20, 1))])
    none = np.zeros(1)
    assert logistic(rows, none, 0.0)[0] == pytest.approx(math.log(4.0), abs=1e-3)
    assert logistic(rows, none, 0.1)[0] == pytest.approx(math.log(7.0), abs=1e-3)
    assert logistic(-rows, none, 0.0, least=none)[0] == 0.0


def test_the_same_pairs_give_the_same_answer() -> None:
    pairs = compared(made_pairs(300, flipped=0.1, seed=2))
    one, other = flips.find(pairs), flips.find(pairs)
    assert np.array_equal(one.margins, other.margins)
    assert one.rate == other.rate


def test_without_scikit_learn_the_message_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairs = made_pairs(5, flipped=0.0, seed=0)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(pair.row) + "\n" for pair in pairs), encoding="utf-8")
    import importlib

    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.startswith("sklearn"):
            raise builtins.ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(SurefootError, match=r"surefoot\[audit\].*--no-flips"):
        audit_data(source, DataOptions())
    assert audit_data(source, DataOptions(flips=False)).report.verdict == "go"
