"""The local engine against the model's own forward pass, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import VOCABULARY, architectures, make_model, make_tokenizer
from transformers import CohereConfig, Gemma2Config, GraniteConfig, PhiConfig, PreTrainedModel

from surefoot import draws
from surefoot.records import Completion, Group, Prompt, StopReason
from surefoot.rollout import LocalEngine, Sampling

STOPS = (0, 2)
TEMPERATURE = 0.8


def engine(model: PreTrainedModel | None = None, **changes: Any) -> LocalEngine:
    settings = {"temperature": TEMPERATURE, "max_new_tokens": 12}
    own = {"rows": 100, "seed": 3, "dtype": torch.float32, "stop_ids": STOPS}
    own.update({k: v for k, v in changes.items() if k in (*own, "interrupt")})
    settings.update({k: v for k, v in changes.items() if k not in own and k != "interrupt"})
    return LocalEngine(
        model or make_model(),
        make_tokenizer(),
        settings=Sampling(**settings),  # type: ignore[arg-type]
        **own,
    )


def prompts(*lengths: int) -> list[Prompt]:
    return [
        Prompt(f"p{i}", 10 + i, tuple(4 + (17 * i + 5 * t) % 90 for t in range(length)), "text")
        for i, length in enumerate(lengths)
    ]


def plain(
    model: PreTrainedModel, prompt: Prompt, sample: int, *, cap: int, greedy: bool = False
) -> tuple[list[int], list[float]]:
    """One completion the slow way: the whole row through the model for every token."""
    ids, logps = list(prompt.ids), []
    for token in range(cap):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        logp = (logits / TEMPERATURE).log_softmax(-1)
        cumulative = np.cumsum(logp.exp().numpy())
        uniform = float(draws.uniform(3, "rollout", prompt.position, sample, token))
        picked = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        if greedy:
            picked = int(logp.argmax())
        ids.append(picked)
        logps.append(float(logp[picked]))
        if picked in STOPS:
            break
    return ids[len(prompt.ids) :], logps


def pairs(groups: Sequence[Group]) -> list[Completion]:
    return [c for group in groups for c in group.completions]


@pytest.mark.parametrize("rows", [100, 3, 1])
@pytest.mark.parametrize("name", architectures())
def test_every_architecture_samples_what_its_own_forward_would(name: str, rows: int) -> None:
    """Prompts of different lengths, rows that leave and enter, sliding windows, ALiBi."""
    model = make_model(architectures()[name], seed=1)
    asked = prompts(5, 11, 3)
    got = pairs(engine(model, rows=rows).sample(asked, 3, purpose="rollout"))
    want = [plain(model, p, g, cap=12) for p in asked for g in range(3)]
    assert [list(c.ids) for c in got] == [ids for ids, _ in want]
    for completion, (_, logps) in zip(got, want, strict=True):
        assert completion.logps == pytest.approx(logps, abs=1e-4)
    assert len({len(c.ids) for c in got}) > 1, "nothing stopped early: the test shows less"


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
HEADS = {
    "soft cap": Gemma2Config(
        **SMALL, head_dim=8, final_logit_softcapping=1.5, query_pre_attn_scalar=8, sliding_window=8
    ),
    "scaled up": CohereConfig(**SMALL, logit_scale=0.25),
    "scaled down": GraniteConfig(**SMALL, logits_scaling=3.0),
    "bias": PhiConfig(**SMALL, partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_a_model_does_to_its_logits_is_done_here_too(name: str) -> None:
    model = make_model(HEADS[name], seed=1)
    if name == "bias":
        with torch.no_grad():
            model.get_output_embeddings().bias.copy_(torch.linspace(-2, 2, VOCABULARY))
    asked = prompts(5, 11)
    got = pairs(engine(model, rows=3).sample(asked, 2, purpose="rollout"))
    want = [plain(model, p, g, cap=12) for p in asked for g in range(2)]
    for completion, (ids, logps) in zip(got, want, strict=True):
        assert list(completion.ids) == ids
        assert completion.logps == pytest.approx(logps, abs=1e-4)


def test_greedy_takes_the_most_likely_and_reports_its_log_probability() -> None:
    model = make_model(seed=1)
    asked = prompts(5, 8)
    got = pairs(engine(model).sample(asked, 1, purpose="eval", greedy=True))
    for prompt, completion in zip(asked, got, strict=True):
        ids, logps = plain(model, prompt, 0, cap=12, greedy=True)
        assert list(completion.ids) == ids
        assert completion.logps == pytest.approx(logps, abs=1e-4)


def test_groups_come_in_the_order_asked_and_carry_the_version() -> None:
    tool = engine()
    tool.load(tool.model, version=7)
    asked = prompts(6, 4, 5)
    groups = tool.sample(asked, 2, purpose="rollout")
    assert [g.prompt for g in groups] == asked
    assert [[c.sample for c in g.completions] for g in groups] == [[0, 1]] * 3
    assert {c.version for c in pairs(groups)} == {7}


def test_nothing_asked_nothing_sampled() -> None:
    assert engine().sample([], 4, purpose="rollout") == []


@pytest.mark.fault(35)
def test_a_cap_of_one() -> None:
    got = pairs(engine(max_new_tokens=1).sample(prompts(5, 3), 3, purpose="rollout"))
    assert all(len(c.ids) == 1 for c in got)
    assert all((c.stop is StopReason.STOP) == (c.ids[0] in STOPS) for c in got)


def test_min_new_tokens_keeps_the_ends_away() -> None:
    """Without the ends the others' probabilities grow, and the log-probabilities say so."""
    model, asked = make_model(seed=1), prompts(5, 3)
    free = pairs(engine(model, max_new_tokens=30).sample(asked, 8, purpose="rollout"))
    assert any(len(c.ids) <= 6 for c in free)
    held = pairs(
        engine(model, max_new_tokens=30, min_new_tokens=6).sample(asked, 8, purpose="rollout")
    )
    assert all(len(c.ids) >= 7 or c.stop is StopReason.LENGTH for c in held)
    assert all(token not in STOPS for c in held for token in c.ids[:6])
    for row, completion in enumerate(held):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([asked[row // 8].ids])).logits[0, -1]
        weight = (logits.double() / TEMPERATURE).exp()
        rest = weight.sum() - weight[list(STOPS)].sum()
        expected = math.log(float(weight[completion.ids[0]] / rest))
        assert completion.logps[0] == pytest.approx(expected, abs=1e-4)


def test_min_equal_to_max_runs_every_completion_to_its_cap() -> None:
    got = pairs(
        engine(max_new_tokens=6, min_new_tokens=6).sample(prompts(5, 3), 6, purpose="rollout")
    )
    assert all(len(c.ids) == 6 and c.stop is StopReason.LENGTH for c in got)


def test_each_prompt_is_read_once_for_its_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = engine(max_new_tokens=3)
    seen: list[tuple[int, ...]] = []
    forward = tool._forward

    def watch(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(tuple(ids.shape))
        return forward(ids, *rest)

    monkeypatch.setattr(tool, "_forward", watch)
    tool.sample(prompts(7, 7, 4), 8, purpose="rollout")
    assert sorted(s for s in seen if s[1] > 1) == [(1, 4), (2, 7)]
    assert all(shape[0] <= 24 for shape in seen)


def test_finished_rows_are_not_decoded_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = engine(max_new_tokens=12)
    seen = 0
    advance = tool._advance

    def watch(state: Any) -> None:
        nonlocal seen
        seen += len(state.rows)
        advance(state)

    monkeypatch.setattr(tool, "_advance", watch)
    got = pairs(tool.sample(prompts(5, 9), 8, purpose="rollout"))
    # The last token of a completion is drawn but never read.
    assert seen == sum(len(c.ids) - 1 for c in got)


def test_the_row_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = engine(rows=5)
    most = 0
    drawn = tool._draw

    def watch(state: Any, *rest: Any, **named: Any) -> None:
        nonlocal most
        most = max(most, len(state.rows))
        drawn(state, *rest, **named)

    monkeypatch.setattr(tool, "_draw", watch)
    assert len(pairs(tool.sample(prompts(5, 3, 9), 4, purpose="rollout"))) == 12
    assert most == 5


def test_an_interrupt_leaves_the_engine_usable() -> None:
    calls = 0

    class Halt(Exception):
        pass

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Halt

    tool = engine(interrupt=interrupt)
    with pytest.raises(Halt):
        tool.sample(prompts(5), 4, purpose="rollout")
    again = tool.sample(prompts(5), 4, purpose="rollout")
    assert again == engine().sample(prompts(5), 4, purpose="rollout")


def test_new_weights_are_taken_over_by_a_copy_in_another_precision() -> None:
    policy = make_model(seed=1)
    tool = engine(policy, dtype=torch.bfloat16)
    assert tool.model is not policy and tool.model.dtype == torch.bfloat16
    assert policy.dtype == torch.float32 and all(p.requires_grad for p in policy.parameters())
    moved = make_model(seed=2)
    with torch.no_grad():
        for mine, theirs in zip(policy.parameters(), moved.parameters(), strict=True):
            mine.copy_(theirs)
    tool.load(policy, version=1)
    fresh = engine(make_model(seed=2), dtype=torch.bfloat16)
    asked = prompts(5, 9)
    got = pairs(tool.sample(asked, 4, purpose="rollout"))
    assert [c.ids for c in got] == [c.ids for c in pairs(fresh.sample(asked, 4, purpose="rollout"))]


def test_in_the_same_precision_the_policy_itself_is_used() -> None:
    policy = make_model(seed=1)
    tool = engine(policy)
    assert tool.model is policy and all(p.requires_grad for p in policy.parameters())


def test_sampling_leaves_no_trace_in_the_policy() -> None:
    policy = make_model(seed=1)
    before = [p.detach().clone() for p in policy.parameters()]
    engine(policy).sample(prompts(5), 4, purpose="rollout")
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    assert all(p.grad is None for p in policy.parameters())
    # Tensors made in inference mode could not be trained on.
    policy(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())


def test_no_generator_is_read_or_moved() -> None:
    tool, asked = engine(), prompts(5)
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        made.append(tool.sample(asked, 4, purpose="rollout"))
        assert torch.equal(torch.get_rng_state(), state)
    assert made[0] == made[1]
