"""Datasets that are damaged, and the commands that read them.

Owns what is wrong with a file of rows. Refuses to own recipes, which are right here.
"""

from __future__ import annotations

import copy
import gzip
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from support.fuzz import FILLER, RECIPE, Case, Odd
from support.fuzz_recipes import PROMPTS, form_of, plain_recipe
from support.fuzz_values import damaged, json_text, keys, scalars, seldom, values
from support.offline import FORMS

# A method for each form that rows have, and the columns that the form may have.
METHODS = ("rloo", "grpo", "ppo", "sft", "sft", "dpo", "simpo", "kto", "reward_model")
COLUMNS = (
    *("prompt", "answer", "id", "task", "chosen", "rejected", "completion", "label", "ranking"),
    *("messages", "text", "margin", "continues", "responses", "question", "weight", "group"),
)
TEXTS = (
    *("", " ", "\n", "\0", "a\0b", "\ud800", "x\udfffy", "\u202e", "\ufeff", "\r\n", "\x1b[2J"),
    *("<|im_end|>", "<|im_start|>user\nhi<|im_end|>", "<|endoftext|>", "<unk>", "<script>", "42"),
    *(
        "say a",
        "é" * 50,
        "long " * 200,
        "1e400",
        "{{ messages }}",
        "\\boxed{1}",
        "#### 7",
        "a" * 900,
    ),
)
ROLES = ("user", "assistant", "system", "tool", "", "User", None, 7)

texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=8))


@st.composite
def messages(draw: DrawFn) -> Any:
    """A conversation, or something like one."""
    made: list[Any] = []
    for _ in range(draw(st.integers(0, 4))):
        if seldom(draw, 7):
            made.append(draw(values))
            continue
        message = {"role": draw(st.sampled_from(ROLES[:3])), "content": draw(texts)}
        if seldom(draw, 5):
            message["role"] = draw(st.sampled_from(ROLES))
        if seldom(draw, 6):
            message[
                draw(st.sampled_from(("name", "content", "tool_calls", "role", "thinking")))
            ] = draw(values)
        if seldom(draw, 10):
            del message["content"]
        made.append(message)
    return made


def _held(draw: DrawFn) -> Any:
    return draw(st.one_of(texts, texts, scalars, values, messages(), st.lists(texts, max_size=4)))


@st.composite
def row_bytes(draw: DrawFn, form: str) -> bytes:
    """The rows of `form` with some of them changed, as JSON lines or one array; then accidents."""
    rows: list[Any] = copy.deepcopy(list(PROMPTS if form == "prompts" else FORMS[form]))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(rows) - 1))
        how = draw(st.sampled_from(("set", "set", "set", "drop", "twin", "whole", "rename", "all")))
        row = rows[place]
        if how == "whole":
            rows[place] = draw(values)
        elif not isinstance(row, dict):
            continue
        elif how == "set":
            there = st.sampled_from(sorted(row) or ["prompt"])
            row[draw(st.one_of(there, there, st.sampled_from(COLUMNS), keys))] = _held(draw)
        elif how == "drop" and row:
            del row[draw(st.sampled_from(sorted(row)))]
        elif how == "twin":
            rows.append(copy.deepcopy(row))
        elif how == "rename" and row:
            row[draw(st.sampled_from(COLUMNS))] = row.pop(draw(st.sampled_from(sorted(row))))
        elif how == "all":
            name, value = draw(st.sampled_from(COLUMNS)), _held(draw)
            rows = [{**r, name: value} if isinstance(r, dict) else r for r in rows]
    lines = [json_text(row) for row in rows]
    if seldom(draw, 6):
        data = f"[{', '.join(lines)}]".encode()
    else:
        data = ("\n".join(lines) + draw(st.sampled_from(("\n", "", "\r\n")))).encode()
    if seldom(draw, 3):
        data = draw(damaged(data))
    return data


@st.composite
def data_files(draw: DrawFn, form: str) -> tuple[str, bytes | Odd]:
    """The name of a file of rows, and what lies there."""
    how = draw(st.sampled_from(range(20)))
    data: bytes | Odd = draw(row_bytes(form))
    assert isinstance(data, bytes)
    if how == 7:
        return "rows.jsonl", draw(st.sampled_from(list(Odd)))
    if how == 11:
        odd = (b"", b"\n\n", b"[]", b"{}", b"\xef\xbb\xbf", b"null\n", FILLER, b"[" * 9000, b"7")
        return "rows.jsonl", draw(st.sampled_from(odd))
    if how in (13, 14):
        packed = gzip.compress(data.replace(FILLER, b"x" * 2000), mtime=0)
        cut = draw(st.integers(0, len(packed)))
        packed = draw(st.sampled_from((packed, packed[:cut], packed + packed[:9], data)))
        return "rows.jsonl.gz", packed
    if how == 16:
        names = (
            "rows.json",
            "rows.parquet",
            "rows.arrow",
            "rows.csv",
            "rows.pkl",
            "rows",
            "é.jsonl",
        )
        return draw(st.sampled_from(names)), data
    return "rows.jsonl", data


@st.composite
def data_cases(draw: DrawFn) -> Case:
    """A right recipe over wrong data."""
    method = draw(st.sampled_from(METHODS))
    form = form_of(method)
    given = form if not seldom(draw, 10) else draw(st.sampled_from(("prompts", *FORMS)))
    name, data = draw(data_files(given))
    source: dict[str, Any] = {
        "source": name,
        "eval_size": draw(st.sampled_from((0, 1, 2, 2, 7, 50))),
    }
    if draw(st.booleans()):
        source |= {"skip_invalid": True, "max_invalid": draw(st.sampled_from((0.2, 1, 1.0, 0)))}
    if seldom(draw, 4):
        source[draw(st.sampled_from(("max_tokens", "max_prompt_tokens")))] = draw(
            st.integers(1, 60)
        )
    if seldom(draw, 4):
        part = draw(st.sampled_from(COLUMNS))
        source["columns"] = {part: draw(st.sampled_from(COLUMNS))}
    if seldom(draw, 7):
        source["allow_control_tokens"] = True
    if seldom(draw, 7):
        source["task"] = draw(texts)
    if seldom(draw, 7):
        source["answer_format"] = "gsm8k"
    recipe = plain_recipe(method)
    recipe["data"] = source
    if seldom(draw, 4) and "reward" in recipe:
        use = draw(st.sampled_from(("exact", "numeric", "math", "code", "boxed", "reasoning_gym")))
        recipe["reward"] = [{"use": use}]
    if seldom(draw, 6):
        recipe["model"]["template"] = "none"
        recipe.setdefault("rollout", {})["stop"] = ["\n"]
    if form == "demonstrations" and draw(st.booleans()):
        recipe["method"]["packing"] = True
    files = {RECIPE: yaml.safe_dump(recipe, sort_keys=False).encode(), name: data}
    return Case("data", draw(_argv(name, form)), files)


@st.composite
def _argv(draw: DrawFn, name: str, form: str) -> tuple[str, ...]:
    verb = draw(st.sampled_from(("train", "train", "data", "data", "data", "eval", "reward")))
    if verb in ("train", "eval"):
        return (verb, RECIPE)
    if verb == "reward":
        return ("audit", "reward", RECIPE, "--no-pilot")
    options = [
        ("--no-flips",),
        ("--fix", draw(st.sampled_from(("fixed.jsonl", "fixed.jsonl.gz", "a/b.jsonl", name, "")))),
        ("--kind", draw(st.sampled_from(("pairs", "prompts", "x")))),
        ("--max-invalid", draw(st.sampled_from(("1", "0", "0.5", "nan", "-1")))),
        ("--eval", draw(st.sampled_from((name, RECIPE, "nowhere.jsonl", ".")))),
        ("--verifier", draw(st.sampled_from(("numeric", "math", "boxed", "exact", "x")))),
        ("--trusted", draw(st.sampled_from((name, RECIPE, "nowhere.jsonl")))),
        ("--column", draw(st.sampled_from(("prompt=question", "chosen=rejected", "x", "a=b=c")))),
        ("--model", draw(st.sampled_from(("model", "nowhere", "rows.jsonl")))),
        ("--max-tokens", draw(st.sampled_from(("1", "30", "0", "x")))),
        ("--answer-format", draw(st.sampled_from(("gsm8k", "x")))),
        ("--out", draw(st.sampled_from(("out", "rows.jsonl", "model")))),
        ("--fix-flips", draw(st.sampled_from(("drop", "swap", "x")))),
        ("--json",),
    ]
    chosen = draw(st.lists(st.sampled_from(options), max_size=2, unique_by=lambda o: o[0]))
    if not seldom(draw, 3):
        chosen = [*(option for option in chosen if option[0] != "--max-invalid"), _LENIENT]
    return ("audit", "data", name, *(word for option in chosen for word in option))


_LENIENT = ("--max-invalid", "1")
