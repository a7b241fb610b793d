"""Process rewards: from a place in the text to a token, and from there to advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.hand import CAP, WEIGHTS, assigned, credited, group, no_kl, row

from surefoot.errors import RecipeError, StoppedOnFinding
from surefoot.learner.batch import Batch, make_batch
from surefoot.learner.update import Facts
from surefoot.loops.credit import Credit
from surefoot.loops.places import place_steps, token_ends
from surefoot.loops.standing import Standing, check_rewards, stand
from surefoot.methods import Method
from surefoot.records import Completion, Group, Score, ScoreStatus, StopReason

Places = Sequence[tuple[int, float]]


class Letters:
    """A tokenizer whose token i is the letter i of the alphabet, so that place and token agree."""

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class Bytes:
    def decode(self, ids: Sequence[int], **how: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Pairs:
    """Tokens of two characters."""

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        return "".join(("12", "34", "5")[i] for i in ids)


def completion(ids: Sequence[int], text: str) -> Completion:
    return Completion(tuple(ids), (-1.0,) * len(ids), StopReason.STOP, 0, 0, text)


def test_half_a_character_is_none() -> None:
    text = "aé1"
    ids = list(text.encode())
    assert token_ends(completion(ids, text), [1, 2, 3], Bytes()) == [0, 2, 3]  # type: ignore[arg-type]


def test_a_token_holds_several_ends() -> None:
    told = completion([0, 1, 2], "12345")
    assert token_ends(told, [1, 2, 3, 5], Pairs()) == [0, 0, 1, 2]  # type: ignore[arg-type]


def test_what_the_tokens_do_not_spell_is_paid_at_the_last() -> None:
    told = completion([0, 1], "12 something else")
    assert token_ends(told, [1, 9], Pairs()) == [0, 1]  # type: ignore[arg-type]


def stepped(steps: Places, *, more: float = 0.0) -> Score:
    """A score whose steps, and `more` beside them, add up."""
    value = math.fsum(x for _, x in steps) + more
    return Score(ScoreStatus.SCORED, value, {"r": value}, steps=tuple(steps))


def spelled(told: Group) -> Group:
    """The group with texts that its ids spell."""
    done = [replace(c, text=Letters().decode(c.ids)) for c in told.completions]
    return replace(told, completions=tuple(done))


def batch_of(*groups: Group) -> Batch:
    return make_batch([spelled(told) for told in groups])


def standing_of(method: Method, batch: Batch) -> Standing:
    steps = place_steps(batch, Letters())  # type: ignore[arg-type]
    return stand(method, batch, max_new_tokens=CAP, weights=WEIGHTS, steps=steps)


def credit_of(method: Method, batch: Batch, facts: Facts | None = None) -> Credit:
    return assigned(method, batch, standing_of(method, batch), facts or Facts())


def test_steps_reach_gae_by_hand() -> None:
    """0.5 at the first of two tokens and 0.5 at the last; V 0.25, gamma 1, lam 0.5.

    Last: 0.5 - 0.25 = 0.25. First: 0.5 + 0.25 - 0.25 + 0.5 * 0.25 = 0.625.
    """
    method = no_kl("ppo", group_size=1, credit={"lam": 0.5}, whiten="none")
    found = credit_of(method, batch_of(group([stepped([(1, 0.5)], more=0.5)], lengths=[2])))
    assert found.signal.advantage_BT.tolist() == [[0.625, 0.25]]
    assert found.monte_carlo_BT is not None
    assert found.monte_carlo_BT.tolist() == [[1.0, 0.5]]


def test_steps_reach_reward_to_go() -> None:
    method = no_kl("reinforce_pp", group_size=1, whiten="none")
    told = stepped([(1, 0.25), (3, 0.5)])
    found = credit_of(method, batch_of(group([told], lengths=[4])))
    assert found.signal.advantage_BT.tolist() == [[0.75, 0.5, 0.5, 0.0]]


def test_two_steps_in_one_token_add_up() -> None:
    method = no_kl("reinforce_pp", group_size=1, whiten="none")
    told = stepped([(2, 0.25), (2, 0.5)])
    found = credit_of(method, batch_of(group([told], lengths=[3])))
    assert found.signal.advantage_BT.tolist() == [[0.75, 0.75, 0.0]]


def test_a_step_in_an_untrained_token_is_paid_just_before() -> None:
    method = no_kl("reinforce_pp", group_size=1, whiten="none")
    told = group([stepped([(1, 0.25), (3, 0.5)])], lengths=[4])
    only = replace(told.completions[0], logps=(-1.0, -1.0, math.nan, -1.0))
    found = credit_of(method, batch_of(replace(told, completions=(only,))))
    assert found.signal.advantage_BT.tolist() == [[0.75, 0.5, 0.0, 0.0]]


def test_the_vector_of_process_supervision_through_the_row() -> None:
    """The numbers of `grpo_process_supervision` (arXiv 2402.03300 section 4.1.3)."""
    method = no_kl("grpo", group_size=2, credit="process", scale={"kind": "group_std", "eps": 0.0})
    one = stepped([(2, 0.2), (4, 0.8)])
    other = stepped([(1, 0.5), (3, 0.1), (5, 0.9)])
    found = credit_of(method, batch_of(group([one, other], lengths=[5, 5])))
    want = [
        [0.0, 0.0, 0.848528137424, 0.848528137424, 0.0],
        [0.0, 0.0, 0.0, 1.1313708499, 1.1313708499],
    ]
    assert torch.allclose(found.signal.advantage_BT, torch.tensor(want).double(), atol=1e-9)


def test_without_steps_process_is_grpo() -> None:
    scores = [1.0, 0.0, 0.3, 0.0]
    batch = batch_of(group(scores), group([1.0, 1.0, 1.0, 1.0], index=1))
    process = credited(no_kl("grpo", group_size=4, credit="process"), batch)
    plain = credited(no_kl("grpo", group_size=4), batch)
    assert torch.equal(process.signal.advantage_BT, plain.signal.advantage_BT)
    assert process.dead_P.tolist() == plain.dead_P.tolist() == [False, True]


def test_equal_sums_at_different_places_are_alive_for_process_alone() -> None:
    """Centred: 1 - 0.5 and 0 - 0.5, each at its place; without scale."""
    early, late = stepped([(1, 1.0), (2, 0.0)]), stepped([(1, 0.0), (2, 1.0)])
    batch = batch_of(group([early, late], lengths=[2, 2]))
    method = no_kl("grpo", group_size=2, credit="process", scale="none")
    found = credit_of(method, batch)
    assert found.signal.advantage_BT.tolist() == [[0.0, -0.5], [0.0, 0.5]]
    assert found.dead_P.tolist() == [False] and found.signal_found
    plain = credit_of(no_kl("grpo", group_size=2), batch)
    assert plain.dead_P.tolist() == [True] and not plain.signal_found


def test_equal_steps_are_dead() -> None:
    same = stepped([(1, 0.7), (2, 0.7)])
    batch = batch_of(group([same, stepped([(2, 0.7)]), same], lengths=[2, 2, 2]))
    found = credit_of(no_kl("grpo", group_size=3, credit="process"), batch)
    assert found.dead_P.tolist() == [True] and not found.signal_found
    assert not bool(found.signal.advantage_BT.any()) and not bool(found.forwarded_B.any())


@pytest.mark.parametrize(("places", "told"), [((1, 1), False), ((1, 2), True)])
def test_a_whitened_return_has_signal_where_steps_differ(
    places: tuple[int, int], told: bool
) -> None:
    scores = [stepped([(place, 1.0)]) for place in places]
    method = no_kl("reinforce_pp", group_size=2)
    assert credit_of(method, batch_of(group(scores, lengths=[2, 2]))).signal_found is told


def test_a_floor_takes_the_place_of_the_steps() -> None:
    method = no_kl(
        "reinforce_pp", group_size=1, whiten="none", truncated={"kind": "floor", "value": -1.0}
    )
    told = group([stepped([(1, 0.5)])], lengths=[3], stops=[StopReason.LENGTH])
    found = credit_of(method, batch_of(told))
    assert found.signal.advantage_BT.tolist() == [[-1.0, -1.0, -1.0]]


def test_a_missing_score_pays_no_steps() -> None:
    method = no_kl("grpo", group_size=3, credit="process", scale="none", min_group=2)
    scores: list[Score | ScoreStatus] = [stepped([(1, 1.0)]), stepped([(1, 0.0)])]
    alone = credit_of(method, batch_of(group([*scores, ScoreStatus.INFRA_ERROR], lengths=[2] * 3)))
    assert alone.signal.advantage_BT.tolist() == [[0.5, 0.0], [-0.5, 0.0], [0.0, 0.0]]


def test_a_scale_of_completions_cannot_scale_steps() -> None:
    method = no_kl("reinforce_pp", group_size=2, whiten="none", baseline="group", scale="group_std")
    batch = batch_of(group([stepped([(1, 1.0)]), stepped([(1, 0.0)])], lengths=[2, 2]))
    with pytest.raises(StoppedOnFinding, match=r"method\.scale group_std .* method\.credit"):
        check_rewards(method, batch, standing_of(method, batch))
    plain = batch_of(group([1.0, 0.0], lengths=[2, 2]))
    check_rewards(method, plain, standing_of(method, plain))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"baseline": "leave_one_out"}, "method.baseline"),
        ({"scale": "batch_std"}, "method.scale"),
        ({"scale": {"kind": "group_std", "per_part": True}}, "method.scale"),
        ({"kl": {"place": "reward_sequence", "coef": 0.1, "estimator": "k1"}}, "method.kl.place"),
    ],
)
def test_process_is_the_papers_form_alone(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        row("grpo", credit="process", **fields)


def test_a_completion_that_was_cut_off_goes_on_in_the_critics_eyes() -> None:
    """No reward, V 0.25 before each of two tokens, 0.5 after the last; lam 1: A = 0.5 - 0.25."""
    method = no_kl(
        "ppo",
        group_size=1,
        credit={"lam": 1.0, "bootstrap_truncated": True},
        whiten="none",
    )
    batch = batch_of(group([0.0], lengths=[2], stops=[StopReason.LENGTH]))
    values = torch.full((1, 2), 0.25, dtype=torch.float64)
    facts = Facts(value_BT=values, bootstrap_B=torch.tensor([0.5], dtype=torch.float64))
    found = credit_of(method, batch, facts)
    assert found.signal.advantage_BT.tolist() == [[0.25, 0.25]]


@pytest.mark.parametrize("truncated", ["mask", "floor"])
def test_what_is_over_does_not_go_on(truncated: str) -> None:
    with pytest.raises(RecipeError, match="bootstrap_truncated"):
        no_kl("ppo", credit={"bootstrap_truncated": True}, truncated=truncated)
