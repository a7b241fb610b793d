"""Law 9: stops are facts that the engine tells; the stopping token is trained, padding never is."""

from __future__ import annotations

import pytest
import torch
from support.engines import PROMPTS, TOKENIZER, make_engine
from support.steps import distance, make_learner, update
from support.tiny import make_model

from surefoot.learner.batch import Batch, make_batch
from surefoot.learner.loss import LossInputs, microbatch_loss
from surefoot.methods import online_rows, with_fields
from surefoot.models.template import PromptTemplate, stop_ids
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason
from surefoot.rollout.stops import StopRule


def test_both_end_ids_end_a_completion() -> None:
    ended = {0: 0, 2: 0}
    groups = make_engine(max_new_tokens=60).sample(PROMPTS, 40, purpose="rollout")
    for completion in (c for g in groups for c in g.completions):
        if completion.stop is StopReason.STOP:
            ended[completion.ids[-1]] += 1
            assert all(token not in (0, 2) for token in completion.ids[:-1])
            assert completion.text == TOKENIZER.decode(completion.ids[:-1])
        else:
            assert len(completion.ids) == 60
            assert all(token not in (0, 2) for token in completion.ids)
    assert ended[0] > 0 and ended[2] > 0


@pytest.mark.fault(35)
def test_a_completion_that_stops_at_its_cap_is_not_truncated() -> None:
    everything = make_engine(max_new_tokens=60).sample(PROMPTS, 40, purpose="rollout")
    stopped = next(
        (g.prompt, c)
        for g in everything
        for c in g.completions
        if c.stop is StopReason.STOP and len(c.ids) > 1
    )
    prompt, completion = stopped
    cap = len(completion.ids)
    again = make_engine(max_new_tokens=cap).sample([prompt], 40, purpose="rollout")
    same = again[0].completions[completion.sample]
    assert same.ids == completion.ids
    assert same.stop is StopReason.STOP
    shorter = make_engine(max_new_tokens=cap - 1).sample([prompt], 40, purpose="rollout")
    cut = shorter[0].completions[completion.sample]
    assert cut.ids == completion.ids[:-1]
    assert cut.stop is StopReason.LENGTH


def test_stop_strings_cut_the_text_and_keep_the_ids() -> None:
    free = make_engine(max_new_tokens=30).sample(PROMPTS, 8, purpose="rollout")
    text = next(c.text for g in free for c in g.completions if len(c.text) > 10)
    word = text[4:6]
    groups = make_engine(max_new_tokens=30, stop=(word,)).sample(PROMPTS, 8, purpose="rollout")
    hits = 0
    for before, after in zip(
        (c for g in free for c in g.completions),
        (c for g in groups for c in g.completions),
        strict=True,
    ):
        if word in before.text:
            hits += 1
            assert after.stop is StopReason.STOP
            assert after.text == before.text[: before.text.index(word)]
            assert TOKENIZER.decode(after.ids) == after.text + word
        else:
            assert after.ids == before.ids
    assert hits >= 1


def test_the_end_token_has_gradient_and_nothing_follows_it() -> None:
    """Padding shares its id with the end token here; only sampled positions count."""
    groups = make_engine(max_new_tokens=60).sample(PROMPTS, 20, purpose="rollout")
    batch = make_batch(groups)
    lengths = torch.tensor([len(c.ids) for g in groups for c in g.completions])
    assert torch.equal(batch.mask_BT.sum(1), lengths)
    logp = torch.full(batch.mask_BT.shape, -1.0, dtype=torch.float64, requires_grad=True)
    weight = torch.where(batch.mask_BT, 1.0, 0.0).double()
    inputs = LossInputs(
        logp,
        logp.detach(),
        logp.detach(),
        logp.detach(),
        None,
        torch.ones_like(logp),
        batch.mask_BT,
        weight,
    )
    microbatch_loss(inputs, online_rows()["rloo"]).loss.backward()
    assert logp.grad is not None
    last = torch.arange(logp.shape[1]) == (lengths - 1)[:, None]
    assert bool((logp.grad[last] != 0).all())
    assert bool((logp.grad[~batch.mask_BT] == 0).all())


def test_the_trained_ids_are_the_sampled_ids() -> None:
    groups = make_engine(max_new_tokens=20).sample(PROMPTS, 4, purpose="rollout")
    batch = make_batch(groups)
    learner = make_learner(make_model(), online_rows()["rloo"])
    plan = learner.plan(batch, torch.ones(16, dtype=torch.bool), step=1)
    flat = [c.ids for g in groups for c in g.completions]
    seen = 0
    for part in plan.passes:
        for row, column, target in zip(
            part.rows_N.tolist(), part.columns_N.tolist(), part.targets_N.tolist(), strict=True
        ):
            assert flat[row][column] == target
            seen += 1
    assert seen == sum(map(len, flat))


def test_every_source_of_stop_ids_counts() -> None:
    model = make_model()
    template = PromptTemplate(TOKENIZER, template="auto", max_context=512)
    model.config.eos_token_id = 5
    model.generation_config.eos_token_id = [6, 7]
    assert template.turn_end() == 2
    assert stop_ids(model.config, model.generation_config, template) == (2, 5, 6, 7)


def test_text_without_stop_strings_is_whole() -> None:
    rule = StopRule(TOKENIZER, (2,), ())
    ids = TOKENIZER("one\ntwo")["input_ids"]
    assert rule.text([*ids, 2]) == "one\ntwo"
    assert not rule.ends(ids)
    assert rule.ends([*ids, 2])


ENDED = [(9, 30, 2), (40, 0), (2,), (50, 51, 52, 53)]
"""Three completions that stopped, by either id, and one that was cut."""


def ended_batch() -> Batch:
    prompt = Prompt("p", 0, (7, 8, 11), "text")
    stops = [StopReason.LENGTH if len(ids) == 4 else StopReason.STOP for ids in ENDED]
    completions = tuple(
        Completion(ids, (-1.0,) * len(ids), stop, 0, g, "text")
        for g, (ids, stop) in enumerate(zip(ENDED, stops, strict=True))
    )
    scores = tuple(Score(ScoreStatus.SCORED, float(g)) for g in range(4))
    return make_batch([Group(prompt, completions, scores)])


@pytest.mark.parametrize("name", online_rows())
def test_the_gradient_of_a_step_is_that_of_the_sampled_tokens_and_their_ends(name: str) -> None:
    """Against plain autograd on one row at a time, where there is no padding to get wrong.

    At unchanged weights the gradient of a ratio is that of the log-probability.
    """
    changes: dict[str, object] = {"reduce": "token_mean", "kl": {"coef": 0.0}, "terms": []}
    if online_rows()[name].ratio.to == "sampler":  # type: ignore[union-attr]
        # The sampled log-probabilities here are made up; the ratio to the trainer's own is 1.
        changes["ratio"] = {"to": "old"}
    row = with_fields(online_rows()[name], changes)
    advantages = [0.7, -1.1, 0.9, 0.4]
    learner = make_learner(make_model(), row, temperature=1.0)  # type: ignore[arg-type]
    out = update(learner, ended_batch(), torch.tensor(advantages))

    def plain(*, ends: bool) -> torch.Tensor:
        model = make_model()
        total = torch.zeros(())
        for ids, advantage in zip(ENDED, advantages, strict=True):
            logits = model(input_ids=torch.tensor([[7, 8, 11, *ids]])).logits[0, 2:-1]
            logp = logits.log_softmax(-1)[range(len(ids)), ids]
            kept = [t for t, token in enumerate(ids) if ends or token not in (0, 2)]
            total = total - advantage * logp[kept].sum() / 10
        total.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double()  # type: ignore

    assert distance(out.gradients[0], plain(ends=True)) < 1e-5
    assert distance(out.gradients[0], plain(ends=False)) > 0.1
