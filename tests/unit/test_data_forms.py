"""Rows that no form fits, or that say something impossible: the place, the column and the mend."""

from __future__ import annotations

import re

import pytest
from example_tools import examples

from surefoot.data import Demonstration, Label, Pair, Ranking
from surefoot.errors import DataError

USER = {"role": "user", "content": "q"}
BOT = {"role": "assistant", "content": "a"}
GOOD = {
    Demonstration: {"prompt": "q", "completion": "a"},
    Pair: {"prompt": "q", "chosen": "a", "rejected": "b"},
    Label: {"prompt": "q", "completion": "a", "label": True},
    Ranking: {"prompt": "q", "ranking": ["a", "b"]},
}
BAD = [
    (Demonstration, 5, "the row is a whole number, not an object"),
    (
        Demonstration,
        {"prompt": "q"},
        r"lacks columns; present: prompt; needed: \(prompt, completion\) or \(messages\) or \(t",
    ),
    (
        Demonstration,
        {"question": "q", "answer": "a"},
        r"Did you mean data\.columns: \{prompt: question, completion: answer\}\?",
    ),
    (Demonstration, {"conversations": [USER, BOT]}, r"data\.columns: \{messages: conversations\}"),
    (
        Demonstration,
        {"prompt": "q", "completion": "a", "messages": [USER, BOT]},
        r"more than one form: \(prompt, completion\) and \(messages\); choose with data\.columns",
    ),
    (Demonstration, {"prompt": "q", "completion": None}, "column 'completion' holds null"),
    (Demonstration, {"prompt": None, "completion": "a"}, "column 'prompt' holds null"),
    (Demonstration, {"prompt": "q", "completion": " "}, "column 'completion' is empty"),
    (Demonstration, {"prompt": "", "completion": "a"}, "prompt column 'prompt' is empty"),
    (Demonstration, {"prompt": "q", "completion": 4}, "column 'completion' holds a whole number"),
    (
        Demonstration,
        {"prompt": "q", "completion": []},
        "column 'completion' holds a list, not text",
    ),
    (Demonstration, {"prompt": "q", "completion": "a\0"}, "column 'completion' contains a NUL"),
    (
        Demonstration,
        {"prompt": "q", "completion": [USER, BOT]},
        "column 'completion' begins with role 'user' and ends with 'assistant'",
    ),
    (Demonstration, {"messages": "hello"}, "column 'messages' holds text, not a list of messages"),
    (Demonstration, {"messages": []}, "column 'messages' holds an empty list"),
    (Demonstration, {"messages": [USER]}, "column 'messages' ends with role 'user'"),
    (Demonstration, {"messages": [BOT]}, "has an answer, but nothing that it answers"),
    (
        Demonstration,
        {"messages": [USER, {"role": "assistant"}]},
        "column 'messages': message 1 is not an object with 'role' and 'content'",
    ),
    (Demonstration, {"prompt": "q", "completion": "a", "id": []}, "column 'id' holds a list"),
    (Demonstration, {"prompt": "q", "completion": "a", "id": "g"}, r"id 'g' was already used by d"),
    (
        Demonstration,
        {"prompt": "q", "completion": "a", "task": ["x"]},
        "column 'task' holds a list",
    ),
    (Demonstration, {"text": ["a"]}, "column 'text' holds a list, not text"),
    (Demonstration, {"text": "a", "continues": "no"}, "column 'continues' holds text, not true or"),
    (
        Pair,
        {"prompt": "q", "chosen": "a"},
        r"needed: \(prompt, chosen, rejected\) or \(chosen, rejected\)",
    ),
    (Pair, {"prompt": "q", "chosen": "a", "rejected": None}, "column 'rejected' holds null"),
    (
        Pair,
        {"chosen": "a", "rejected": "b"},
        "no column 'prompt', and 'chosen' and 'rejected' are no conversations or Human/Assistant",
    ),
    (Pair, {"chosen": [BOT], "rejected": [BOT]}, "there is no column 'prompt'"),
    (
        Pair,
        {
            "chosen": [USER, BOT],
            "rejected": [{"role": "user", "content": "other"}, BOT],
        },
        "begin with no shared message before their answers",
    ),
    (
        Pair,
        {"chosen": [USER, BOT], "rejected": [USER, BOT, USER, BOT]},
        "rejected goes on with assistant, user, assistant after the 1 shared messages",
    ),
    (
        Pair,
        {"prompt": "else", "chosen": [USER, BOT], "rejected": [USER, BOT]},
        "column 'prompt' is not what 'chosen' and 'rejected' begin with",
    ),
    (
        Pair,
        {"prompt": [USER], "chosen": [BOT, USER, BOT], "rejected": [BOT]},
        "column 'chosen' holds 3 messages; an answer is one turn",
    ),
    (
        Pair,
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"},
        "begin with no shared turn",
    ),
    (
        Pair,
        {
            "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "rejected": "\n\nHuman: a\n\nAssistant: x",
        },
        "chosen goes on with assistant, user, assistant after the 1 shared turns",
    ),
    (
        Pair,
        {"chosen": "\n\nHuman: a\n\nAssistant: ", "rejected": "\n\nHuman: a\n\nAssistant: x"},
        "column 'chosen' has an empty answer",
    ),
    (
        Pair,
        {"chosen": "\n\nHuman:\n\nAssistant: b", "rejected": "\n\nHuman:\n\nAssistant: c"},
        "turn 0 of the shared part is empty",
    ),
    (Pair, {**GOOD[Pair], "margin": "big"}, "column 'margin' holds text, not a number"),
    (Pair, {**GOOD[Pair], "margin": True}, "column 'margin' holds true or false, not a number"),
    (
        Label,
        {"prompt": "q", "completion": "a"},
        r"needed: \(prompt, completion, label\) or \(prompt",
    ),
    (Label, {**GOOD[Label], "label": 2}, "column 'label' holds a whole number, not true or false"),
    (
        Ranking,
        {"prompt": "q", "ranking": ["a"]},
        "column 'ranking' holds 1 answers, not a list of t",
    ),
    (Ranking, {"prompt": "q", "ranking": "ab"}, "column 'ranking' holds text, not a list of two"),
    (Ranking, {"prompt": "q", "ranking": ["a", 3]}, r"column 'ranking\[1\]' holds a whole number"),
    (Ranking, {"prompt": "q", "ranking": ["", "a"]}, r"column 'ranking\[0\]' is empty"),
]


def train_on(row):
    return {"train_on": "all"} if isinstance(row, dict) and "text" in row else {}


@pytest.mark.fault(31)
@pytest.mark.parametrize(("kind", "row", "message"), BAD)
def test_a_bad_row_is_named_with_its_reason(kind, row, message):
    rows = [{**GOOD[kind], "id": "g"}, row]
    with pytest.raises(DataError, match=rf"data\[1\]: .*{message}") as caught:
        examples(rows, kind, **(train_on(row) if kind is Demonstration else {}))
    assert "data.skip_invalid: true" in str(caught.value)


@pytest.mark.fault(31)
@pytest.mark.parametrize(("kind", "row", "message"), BAD)
def test_a_bad_row_can_be_skipped_and_is_listed(kind, row, message):
    rows = [{**GOOD[kind], "id": "g"}, row]
    skip = {"skip_invalid": True, "max_invalid": 0.5}
    how = train_on(row) if kind is Demonstration else {}
    built = examples(rows, kind, options=skip, **how)
    (listed,) = built.report.quarantine
    assert listed.where == "data[1]"
    assert re.search(message, listed.reason)
    assert len(built.stream) == 1


def test_a_form_is_chosen_by_the_columns_that_are_named():
    row = {"prompt": "q", "completion": "a", "messages": [USER, BOT, USER, BOT]}
    talk = examples([row], Demonstration, columns={"messages": "messages"}, train_on="assistant")
    (example,) = talk.stream.take(1, step=1)
    assert sum(example.trained) == 4  # two turns of one letter, and their ends
    answer = examples([row], Demonstration, columns={"completion": "completion"})
    (example,) = answer.stream.take(1, step=1)
    assert sum(example.trained) == 2


def test_a_named_column_must_be_there():
    with pytest.raises(
        DataError, match=r"column 'gap' is missing; columns present: prompt, chosen"
    ):
        examples([GOOD[Pair]], Pair, columns={"margin": "gap"})


def test_nested_columns_are_reached_by_a_path():
    row = {"prompt": "q", "answers": {"good": "a", "bad": "b"}}
    columns = {"chosen": "answers.good", "rejected": "answers.bad"}
    assert len(examples([row], Pair, columns=columns).stream) == 1
