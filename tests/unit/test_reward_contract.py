"""The two contracts: what a function is given, and how what it returns is read."""

from __future__ import annotations

import decimal
import math
import socket
from fractions import Fraction

import numpy as np
import pytest

from surefoot.errors import RewardError
from surefoot.records import Score, ScoreStatus, StopReason
from surefoot.reward import RewardSample, batch, contract, reward_function, wire

CHAT = ({"role": "user", "content": "How many?"},)


def sample(text: str = "t", *, messages=None, answer="7", **columns: object) -> RewardSample:
    return RewardSample("p", text, (1, 2), answer, "sums", columns, StopReason.LENGTH, messages)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (-2, -2.0),
        (True, 1.0),
        (False, 0.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (None, None),
    ],
)
def test_values_that_count(value, expected):
    verdict = contract.read_value(value)
    assert verdict.status is ScoreStatus.SCORED
    assert verdict.value == expected


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        "1",
        b"1",
        [1.0],
        {},
        1j,
        pytest.param(object(), id="object"),
        decimal.Decimal(1),
        10**400,
        np.array([1.0]),
        np.float64("nan"),
        np.array(math.inf),
    ],
    ids=repr,
)
def test_values_that_are_the_graders_fault(value):
    verdict = contract.read_value(value)
    assert verdict.status is ScoreStatus.INFRA_ERROR
    assert type(value).__name__ in verdict.detail or "float" in verdict.detail


def test_a_score_keeps_its_state_and_detail():
    assert contract.read_value(Score(ScoreStatus.SCORED, 0.5)).value == 0.5
    verdict = contract.read_value(Score(ScoreStatus.UNSCORABLE, detail="empty gold"))
    assert (verdict.status, verdict.detail) == (ScoreStatus.UNSCORABLE, "empty gold")


def test_the_decorator_returns_the_function_itself():
    def f(sample):
        return 1.0

    assert reward_function(f) is f
    assert contract.mark_of(f) == contract.NativeMark(None, None)
    g = reward_function(name="better", price=0.01)(lambda sample: 1.0)
    assert contract.mark_of(g) == contract.NativeMark("better", 0.01)
    assert contract.mark_of(lambda sample: 1.0) is None
    with pytest.raises(RewardError, match="marks a function"):
        reward_function(7)


def test_a_sample_survives_the_way_to_a_worker():
    given = sample("naïve \ud800", messages=CHAT, level=3, tags=["a"], nothing=None)
    seen = []
    serve = contract.serve_native(lambda sample: seen.append(sample), {})
    body = wire.encode({"payload": 0})  # any frame before it does not matter
    inbox = wire.Inbox()
    messages = inbox.feed(wire.frame(body) + wire.frame(contract.encode_sample(given, "row")))
    assert serve(messages[1]) == {"status": "scored", "value": None, "detail": ""}
    assert seen == [given]


def test_a_column_that_is_not_json_is_named_with_its_row():
    with pytest.raises(RewardError, match=r"'when' of row r1 .*Decimal"):
        contract.encode_sample(sample(when=decimal.Decimal(1)), "r1")
    body = contract.encode_sample(sample(vector=np.arange(2)), "r1")
    assert b'"vector":[0,1]' in body


def test_native_options_are_keyword_arguments():
    serve = contract.serve_native(lambda sample, *, scale: scale * len(sample.text), {"scale": 3})
    (message,) = wire.Inbox().feed(wire.frame(contract.encode_sample(sample("ab"), "r")))
    assert serve(message)["value"] == 6.0


def call(function, samples, **options):
    """What a batch function is called with, and the reply, as a worker would do it."""
    payload = wire.Inbox().feed(wire.frame(batch.encode_batch(samples, step=5)))[0]
    return batch.serve_batch(function, batch.signature_of(function), options)(payload)


def values(reply):
    return [part["value"] for part in reply["parts"]]


def test_plain_rows_give_strings_and_columns():
    seen = {}

    def f(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids)
        return [0.0, 1]

    rows = [sample("a", level=1, prompt="dropped", completion="dropped"), sample("b", answer=None)]
    assert values(call(f, rows)) == [0.0, 1.0]
    state = seen.pop("trainer_state")
    assert state.global_step == 5
    assert callable(seen.pop("log_extra")) and callable(seen.pop("log_metric"))
    assert seen == {
        "prompts": ["p", "p"],
        "completions": ["a", "b"],
        "ids": [[1, 2], [1, 2]],
        "answer": ["7", None],
        "task": ["sums", "sums"],
        "level": [1, None],
    }


def test_chat_rows_give_messages():
    def f(prompts, completions, **kwargs):
        assert prompts == [[{"role": "user", "content": "How many?"}]]
        assert completions == [[{"role": "assistant", "content": "seven"}]]
        return [float(len(completions[0][0]["content"]))]

    assert values(call(f, [sample("seven", messages=CHAT)])) == [5.0]


def test_a_datasets_own_answer_column_wins():
    def f(completions, answer):
        return [float(sum(a)) for a in answer]

    row = RewardSample("p", "t", (1,), "text form", "x", {"answer": [1, 2]}, StopReason.STOP)
    assert values(call(f, [row])) == [3.0]


def test_only_the_arguments_that_it_takes_are_given():
    def f(completions, level=9):
        return [float(level[0])]

    assert values(call(f, [sample(level=3, other=1)])) == [3.0]

    def g(completions, level=9):
        return [float(level)]

    assert values(call(g, [sample(other=1)])) == [9.0]


def test_a_required_column_that_no_row_has_is_named():
    def f(completions, ground_truth):
        return [0.0]

    with pytest.raises(RewardError, match=r"'ground_truth'.*answer, level, task"):
        call(f, [sample(level=1)])
    assert values(call(f, [sample()], ground_truth="an option")) == [0.0]


def test_harmless_objects_and_logged_metrics():
    def f(completions, trainer_state, log_extra, log_metric):
        log_extra("note", ["x"])
        log_metric("accuracy", 0.5)
        return [trainer_state.global_step / 10]

    reply = call(f, [sample()])
    assert values(reply) == [0.5]
    assert reply["metrics"] == {"accuracy": 0.5}


def test_async_functions_are_awaited():
    async def f(completions, **kwargs):
        return [1.0] * len(completions)

    assert values(call(f, [sample(), sample()])) == [1.0, 1.0]

    async def native(sample):
        return 0.5

    serve = contract.serve_native(native, {})
    (message,) = wire.Inbox().feed(wire.frame(contract.encode_sample(sample(), "r")))
    assert serve(message)["value"] == 0.5


@pytest.mark.fault(24)
def test_each_value_of_a_list_is_read_by_the_rule():
    reply = batch.read_list([1.0, None, math.nan, "1", True], 5)
    parts = batch.read_reply(reply, 5)
    assert [part.value for part in parts] == [1.0, None, None, None, 1.0]
    assert [part.status.value for part in parts] == [
        "scored",
        "scored",
        "infra_error",
        "infra_error",
        "scored",
    ]
    assert batch.read_list(np.array([0.5, 1.0]), 2)["parts"][1]["value"] == 1.0


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ([1.0], "1 values for 2"),
        ([1.0] * 3, "3 values for 2"),
        (1.0, "float"),
        ("ab", "str"),
        ({0: 1.0, 1: 1.0}, "dict"),
        (None, "None"),
        (np.array(1.0), "float"),
    ],
)
def test_a_wrong_list_fails_every_sample(result, reason):
    parts = batch.read_reply(batch.read_list(result, 2), 2)
    assert [part.status for part in parts] == [ScoreStatus.INFRA_ERROR] * 2
    assert reason in parts[0].detail


def test_messages_are_whole_however_their_bytes_arrive():
    sent = [{"a": 1}, [], "é" * 500, None]
    stream = b"".join(wire.frame(wire.encode(message)) for message in sent)
    for size in (1, 7, len(stream)):
        inbox, got = wire.Inbox(), []
        for start in range(0, len(stream), size):
            got += inbox.feed(stream[start : start + size])
        assert got == sent


def test_receive_takes_one_message_and_leaves_the_next():
    left, right = socket.socketpair()
    with left, right:
        wire.send(left, "one")
        wire.send(left, "two")
        left.close()
        assert wire.receive(right) == "one"
        assert wire.receive(right) == "two"
        assert wire.receive(right) is None


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(RewardError, match="no message of ours"):
        wire.Inbox().feed(b"hello, world")
