"""Run directories that something happened to, and the commands that read them.

Owns the prepared runs, and the accidents. Refuses to own what may be lost by them (`fuzz`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from support.fuzz import RECIPE, RUN, Case, Edit, Odd, put, remove
from support.fuzz_recipes import chain_recipe, form_of, plain_recipe, rows_of
from support.fuzz_values import DAMAGE, parent_of, paths_of, seldom, values
from support.runs import REWARD, command

BASES: Mapping[str, dict[str, Any]] = {
    # With strings that end a completion, so that some of its samples are whole.
    "rloo": plain_recipe(
        "rloo", run__eval_every=1, run__samples="all", rollout__stop=list("aeinst")
    ),
    "ppo": plain_recipe("ppo"),
    "lora": plain_recipe("grpo", model__lora={"rank": 2}),
    "dpo": plain_recipe("dpo", run__eval_every=2),
    "sft": plain_recipe("sft", run__eval_every=2),
    "reward_model": plain_recipe("reward_model"),
    "chain": chain_recipe("rloo", "grpo"),
}
WAITING = "waiting.json"
_WAITS = "rloo"
"""The base whose last rows the disk refused."""
_TABLES = ("metrics.jsonl", "groups.jsonl", "samples.jsonl", "events.jsonl")
_STEPS = ("step_000001", "step_000002")
_ONE = (
    *(RECIPE, RECIPE, "environment.json", "environment.json", *_TABLES, "metrics.jsonl"),
    *("run.lock", "checkpoints", "reference", "tensorboard", "model", "stages", "report.html"),
    *("critic.json", "judge.json", "foreign.bin", "curve.png", "warmup", WAITING, WAITING),
    *(f"checkpoints/{step}" for step in _STEPS),
    *(
        f"checkpoints/{step}/{name}"
        for step in _STEPS
        for name in ("MANIFEST.json", "state.json", "policy.safetensors", "optimizer.safetensors")
    ),
    *(f"checkpoints/{name}" for name in ("step_000003", "step_9", ".tmp-step_000003-1", "notes")),
    *("checkpoints/step_000002.corrupt", "checkpoints/step_000002.aside"),
    *("checkpoints/step_000002/foreign.pt", "checkpoints/step_000002/critic.safetensors"),
)
_CHAIN = (
    *(RECIPE, "environment.json", "run.lock", "stages", "checkpoints"),
    *("stages/01_s0", "stages/02_s1", "stages/03_s2", "stages/02_s1/model", "stages/01_s0/model"),
    *("stages/01_s0/model/config.json", "stages/01_s0/model/model.safetensors"),
    *("stages/01_s0/model/tokenizer.json", "stages/02_s1/model/tokenizer_config.json"),
    *(f"stages/02_s1/{name}" for name in (*_ONE[:12], WAITING)),
)


def prepare(home: Path, model: Path, names: tuple[str, ...] = tuple(BASES)) -> dict[str, Path]:
    """Train each of the runs that cases are copies of; a folder with recipe, rows and `run`."""
    made = {}
    for name in names:
        folder = made[name] = home / name
        folder.mkdir(parents=True)
        (folder / "model").symlink_to(model)
        recipe = BASES[name]
        form = form_of(recipe["method"]["name"]) if "method" in recipe else "prompts"
        (folder / "rows.jsonl").write_bytes(rows_of(form))
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        (folder / RECIPE).write_text(yaml.safe_dump(recipe), encoding="utf-8")
        child = command("train", RECIPE, cwd=folder)
        _, err = child.communicate(timeout=200)
        assert child.returncode == 0, err
        for name_ in (child.out, child.err, folder / "model"):
            name_.unlink()
    if _WAITS in made:
        _put_aside(made[_WAITS] / RUN)
    return made


def _put_aside(run: Path) -> None:
    """The last row of each table, as a disk that fills before the last checkpoint leaves them."""
    aside = {}
    for name in _TABLES:
        *lines, last = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join(lines))
        aside[name] = [last.decode()]
    (run / WAITING).write_text(json.dumps(aside), encoding="utf-8")


def apply(edit: Edit, run: Path) -> None:
    """Do to the run directory what `edit` says; what is not there is left alone."""
    path = run / edit.path
    try:
        if edit.op == "put":
            assert isinstance(edit.value, bytes | Odd)
            put(path, edit.value)
        elif edit.op == "rename":
            path.rename(run / str(edit.value))
        elif edit.op == "copy":
            target = run / str(edit.value)
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, target)
        elif edit.op == "delete":
            remove(path)
        elif path.is_file():
            path.write_bytes(_edited(edit, path.read_bytes()))
    except OSError:
        # An earlier change took the place away.
        return


def _edited(edit: Edit, data: bytes) -> bytes:
    place = edit.at * len(data) // 1000
    if edit.op == "truncate":
        return data[:place]
    if edit.op == "insert":
        assert isinstance(edit.value, bytes)
        return data[:place] + edit.value + data[place:]
    if edit.op == "flip":
        place = min(place, len(data) - 1)
        return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] if data else data
    assert edit.op in ("set", "unset"), edit
    lines = edit.path.endswith(".jsonl")
    try:
        text = data.decode()
        if lines:
            tree: Any = [json.loads(line) for line in text.splitlines()]
        else:
            tree = yaml.safe_load(text)
    except ValueError:
        return data
    except yaml.YAMLError:
        return data
    places = paths_of(tree)
    if not places:
        return data
    path = places[edit.at * len(places) // 1001]
    if edit.op == "set":
        parent_of(tree, path)[path[-1]] = edit.value
    else:
        del parent_of(tree, path)[path[-1]]
    if lines:
        return "".join(json.dumps(row) + "\n" for row in tree).encode()
    if edit.path.endswith(".json"):
        return json.dumps(tree).encode()
    header = text.splitlines()[0] + "\n" if text.startswith("#") else ""
    return (header + yaml.safe_dump(tree, sort_keys=False)).encode()


@st.composite
def edits(draw: DrawFn, paths: tuple[str, ...]) -> Edit:
    path = draw(st.sampled_from(paths))
    if path.endswith((".json", ".jsonl", ".yaml")) and not seldom(draw, 3):
        op = draw(st.sampled_from(("set", "set", "set", "unset")))
        value = draw(values) if op == "set" else None
        return Edit(op, path, draw(st.integers(0, 1000)), value)
    op = draw(
        st.sampled_from(("put", "put", "rename", "copy", "delete", "truncate", "insert", "flip"))
    )
    if op == "put":
        data = st.sampled_from((b"", b"{}", b"[]\n", b"null\n", b"\xff\xfe", b"\x80\x04.", b"7\n"))
        return Edit(op, path, 0, draw(st.one_of(data, st.sampled_from(list(Odd)))))
    if op in ("rename", "copy"):
        return Edit(op, path, 0, draw(st.sampled_from(paths)))
    if op == "delete":
        return Edit(op, path)
    value = draw(st.sampled_from(DAMAGE)) if op == "insert" else None
    return Edit(op, path, draw(st.integers(0, 1000)), value)


@st.composite
def run_cases(draw: DrawFn, bases: tuple[str, ...] = tuple(BASES)) -> Case:
    """A copy of a finished run after one to three accidents, and a command that reads it."""
    base = draw(st.sampled_from(bases))
    paths = _CHAIN if base == "chain" else _ONE
    made = tuple(draw(edits(paths)) for _ in range(draw(st.integers(1, 3))))
    return Case("run", draw(_argv(base)), base=base, edits=made)


@st.composite
def _argv(draw: DrawFn, base: str) -> tuple[str, ...]:
    place = RUN
    if base == "chain":
        place = draw(st.sampled_from((RUN, "run/stages/01_s0", "run/stages/02_s1")))
    step = draw(st.sampled_from(("1", "2", "3", "0", "-1", "x")))
    changes = (
        *(
            "run.steps=3",
            "run.steps=3",
            "run.steps=1",
            "run.keep=1",
            "run.seed=4",
            "run.eval_every=1",
        ),
        *("optim.learning_rate=1", "run.allow_change=[run.seed]", "optim.tokens_per_microbatch=64"),
        *("run.allow_change=[optim]", "model.dtype=bfloat16", "data.eval_size=1", "reward=exact"),
    )
    more = draw(st.lists(st.sampled_from(changes), max_size=2, unique=True))
    chosen: tuple[str, ...] = draw(
        st.sampled_from(
            (
                *(("train", RECIPE, "run.steps=3"),) * 3,
                *(("train", RECIPE, *more),) * 3,
                ("train", f"{place}/{RECIPE}", *more),
                *(("eval", place),) * 2,
                ("eval", place, "--json", "--checkpoint", step),
                ("eval", place, *more),
                *(("export", place, "out"),) * 2,
                ("export", place, "out", "--merge"),
                ("export", place, "out", "--checkpoint", step),
                ("export", place, draw(st.sampled_from((RUN, ".", "rows.jsonl", "a/b", "")))),
                ("export", place, "out.jsonl", "--pairs"),
                ("export", place, "out.jsonl", "--demonstrations", "0.1"),
                ("train", place),
            )
        )
    )
    return chosen
