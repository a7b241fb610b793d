"""From a recipe's `use` to something that can be called.

Owns the built-in names, telling the two contracts apart by signature, and checking options, names
and prices before anything runs.
Refuses to own importing a user's function (`find.py`), and running one.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surefoot.errors import RecipeError, RewardError
from surefoot.reward import batch
from surefoot.reward.code import CodeOptions, code, settle, tampered
from surefoot.reward.contract import BatchScorer, mark_of, serve_native
from surefoot.reward.cosine import COSINE
from surefoot.reward.find import find
from surefoot.reward.form import FORM
from surefoot.reward.maths import MATHS
from surefoot.reward.nursery import Served
from surefoot.reward.options import fill, nearest
from surefoot.reward.paid import identity_of
from surefoot.reward.rules import RULES, Rule
from surefoot.reward.tasks import TASKS

if TYPE_CHECKING:
    from surefoot.reward.judge import Judges

BUILT_INS = RULES | MATHS | FORM | COSINE | TASKS
MODEL = "model"
CODE = "code"
JUDGE = "judge"
_NAMES = (*BUILT_INS, MODEL, CODE, JUDGE)
DEFAULT_TIMEOUT = 10.0
LONGEST_TIMEOUT = 86_400.0
DEFAULT_RETRIES = 1


class Part(Protocol):
    """What this room reads of one entry of a recipe's `reward` list."""

    @property
    def use(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def name(self) -> str | None: ...
    @property
    def timeout(self) -> float: ...
    @property
    def price(self) -> float | None: ...
    @property
    def retries(self) -> int: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class FunctionPart:
    """A function that was passed as a Python object, with the same settings as a recipe's entry."""

    function: Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    price: float | None = None
    retries: int = DEFAULT_RETRIES
    options: Mapping[str, Any] = field(default_factory=dict)


class Watch(Protocol):
    """Metrics that a reward keeps itself: `begin` starts those of a new step."""

    def begin(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Reward:
    """One resolved reward: one of `rule`, `scorer` and `served` is set.

    `rule` (one sample) and `scorer` (all of them) run in this process, `served` in a worker.
    `batched` rewards are called once for all samples. A `concurrent` scorer mostly waits for
    others: it runs beside all other rewards, in a thread, and keeps its own deadlines.
    `price` is US dollars per call, if known, and `identity` a hash of the function and its options
    under which paid scores are kept. `retries` are those of a failed call in a worker.
    `warm`, `recycle` and `at_limit` are those of `rules.Hired`. `note` is what a run says and
    records about it at its start. `watch` has metrics of its own. `tampered` says of a verdict's
    detail whether the completion tried to forge its score.
    """

    name: str
    weight: float
    timeout: float
    price: float | None
    rule: Rule | None = None
    scorer: BatchScorer | None = None
    served: Served | None = None
    batched: bool = False
    warm: Callable[[], None] | None = None
    recycle: int | None = None
    at_limit: Rule | None = None
    note: str = ""
    watch: Watch | None = None
    concurrent: bool = False
    retries: int = DEFAULT_RETRIES
    identity: str | None = None
    tampered: Callable[[str], bool] | None = None


def resolve(
    parts: Sequence[Part | FunctionPart | Callable[..., Any]],
    *,
    base_dir: Path | None = None,
    max_new_tokens: int | None = None,
    allow: Collection[str] = (),
    judges: Judges | None = None,
) -> tuple[Reward, ...]:
    """Every reward of a run, in order. RewardError or RecipeError says what cannot be used.

    `max_new_tokens` is the rollout's cap, for rewards that measure length against it; `allow` is
    the recipe's `run.allow`; `judges` is what judge rewards share.
    """
    if not parts:
        raise RewardError(
            "there is no reward; add one, such as `reward: [{use: numeric}]`, or pass rewards="
        )
    rewards = tuple(_resolve_one(part, base_dir, max_new_tokens, allow, judges) for part in parts)
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(
                f"two rewards are named {name!r}; give each its own name: {{use: ..., name: ...}}"
            )
    return rewards


def _resolve_one(
    given: Part | FunctionPart | Callable[..., Any],
    base: Path | None,
    cap: int | None,
    allow: Collection[str],
    judges: Judges | None,
) -> Reward:
    if isinstance(given, FunctionPart):
        return _user_function(given, given.function, _call_name(given.function))
    if hasattr(given, "use"):
        part: Part = given
        if part.use in BUILT_INS:
            return _built_in(part, cap)
        if part.use == MODEL:
            return _model(part, base)
        if part.use == CODE:
            return _code(part, allow)
        if part.use == JUDGE:
            return _judge(part, judges)
        function = find(part.use, base_dir=base, built_in=_NAMES)
        return _user_function(part, function, _call_name(function))
    if not callable(given):
        raise RewardError(f"a reward is a recipe entry or a function, not {given!r}")
    return _resolve_one(FunctionPart(given), base, cap, allow, judges)


def _built_in(part: Part, cap: int | None) -> Reward:
    built_in = BUILT_INS[part.use]
    given = dict(part.options)
    if built_in.cap is not None and given.get(built_in.cap) is None:
        given[built_in.cap] = cap
    options = fill(built_in.schema, given, reward=part.use)
    rule, hired = built_in.make(options), built_in.hire(options)
    name, settings = _metric_name(part.name or part.use), _settings(part, None)
    if hired is None:
        _refuse_retries(part, name)
        return Reward(name=name, **settings, rule=rule)
    return Reward(
        name=name,
        **settings,
        served=serve_native(rule, {}),
        warm=hired.warm,
        recycle=hired.recycle,
        at_limit=hired.at_limit,
    )


def _model(part: Part, base: Path | None) -> Reward:
    # Not at the top of the file: it brings torch, which no other reward needs.
    from surefoot.reward.model import ModelOptions, ModelReward

    name, settings = _metric_name(part.name or part.use), _settings(part, None)
    if part.timeout != DEFAULT_TIMEOUT:
        raise RecipeError(
            f"reward.timeout is {part.timeout}, and no deadline can be kept for reward {name!r}: a "
            "model runs in the run's own process; leave it out"
        )
    _refuse_retries(part, name)
    options = fill(ModelOptions, part.options, reward=part.use)
    return Reward(name=name, **settings, scorer=ModelReward(options, name=name, base_dir=base))


def _judge(part: Part, judges: Judges | None) -> Reward:
    # Not at the top of the file: most runs have no judge, and its schema needs pydantic.
    from surefoot.reward.judge import JudgeOptions, JudgeReward

    options = fill(JudgeOptions, part.options, reward=part.use)
    name, settings = _metric_name(part.name or part.use), _settings(part, None)
    if part.timeout != DEFAULT_TIMEOUT:
        raise RecipeError(
            f"reward.timeout of reward {name!r}: nothing would read it; set judge.timeout, for one "
            "request, or judge.deadline, for one verdict"
        )
    if part.retries != DEFAULT_RETRIES:
        raise RecipeError(
            f"reward.retries of reward {name!r}: nothing would read it; a judge is asked again "
            "until judge.deadline"
        )
    if part.price is not None:
        raise RecipeError(
            f"reward.price of reward {name!r}: a judge is paid by the token; set "
            "judge.price_per_million_input and judge.price_per_million_output"
        )
    if judges is None:
        raise RewardError(
            f"reward {name!r} needs the recipe's section judge, as in judge: {{base_url: "
            "http://127.0.0.1:8000/v1, model: NAME}"
        )
    judge = JudgeReward(options, name=name, judges=judges)
    return Reward(name=name, **settings, scorer=judge, watch=judge, concurrent=True)


def _code(part: Part, allow: Collection[str]) -> Reward:
    options = fill(CodeOptions, part.options, reward=part.use)
    settings = _settings(part, None)
    # A program must not be able to make its score missing by using up its own limits.
    if part.timeout == DEFAULT_TIMEOUT:
        settings["timeout"] = options.deadline
    elif part.timeout < options.deadline:
        raise RecipeError(
            f"reward.timeout of reward 'code' is {part.timeout:g}, less than the "
            f"{options.deadline:g} s that its own limits may take; leave it out, or lower "
            "total_limit, which ends the program"
        )
    found = settle(options, allow)
    served = serve_native(code(options, found.tier), {})
    name = _metric_name(part.name or part.use)
    return Reward(name=name, **settings, served=served, note=str(found), tampered=tampered)


def _user_function(
    part: Part | FunctionPart, function: Callable[..., Any], call_name: str
) -> Reward:
    mark = mark_of(function)
    marked_name = None if mark is None else mark.name
    name = _metric_name(part.name or marked_name or call_name)
    try:
        signature = batch.signature_of(function) if mark is None else None
    except ValueError as error:
        raise RewardError(f"reward {name!r}: {error}") from error
    _check_options(function, part.options, name=name, native=mark is not None)
    settings = _settings(part, None if mark is None else mark.price)
    if settings["price"] is not None:
        settings |= _kept(function, part.options, name)
    if signature is None:
        return Reward(name=name, **settings, served=serve_native(function, part.options))
    if not signature.is_batch:
        raise RewardError(
            f"reward {name!r} takes ({', '.join(sorted(signature.names))}), which is neither "
            "contract: mark a one-sample function with @surefoot.reward_function, or take "
            "prompts, completions, completion_ids and **columns by keyword"
        )
    served = batch.serve_batch(function, signature, part.options)
    return Reward(name=name, **settings, served=served, batched=True)


def _refuse_retries(part: Part, name: str) -> None:
    if part.retries != DEFAULT_RETRIES:
        raise RecipeError(
            f"reward.retries of reward {name!r}: nothing would read it; it runs in the run's own "
            "process, where a call that fails would fail again. Leave it out"
        )


def _kept(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The identity under which a paid function's scores are kept, or the note that they are not."""
    identity = identity_of(function, options)
    if identity is not None:
        return {"identity": identity}
    note = (
        f"reward {name}: its paid scores are not kept, because its function has no file of its "
        "own, or holds values that are not plain JSON"
    )
    return {"note": note}


def _settings(part: Part | FunctionPart, marked_price: float | None) -> dict[str, Any]:
    if not math.isfinite(part.weight):
        raise RecipeError(f"reward.weight is {part.weight}; it is a finite number")
    if not 0.0 < part.timeout <= LONGEST_TIMEOUT:
        raise RecipeError(
            f"reward.timeout is {part.timeout}; it is seconds, more than 0 and at most a day "
            f"({LONGEST_TIMEOUT:g})"
        )
    price = marked_price if part.price is None else part.price
    if price is not None and not 0.0 <= price < math.inf:
        raise RecipeError(f"reward.price is {price}; it is US dollars per call, 0 or more")
    if part.retries < 0:
        raise RecipeError(f"reward.retries is {part.retries}; it is a number from 0 on")
    return {
        "weight": float(part.weight),
        "timeout": float(part.timeout),
        "price": price,
        "retries": int(part.retries),
    }


def _check_options(
    function: Callable[..., Any], options: Mapping[str, Any], *, name: str, native: bool
) -> None:
    """Options of a user's reward are its own named parameters, so that a typo cannot pass."""
    parameters = list(inspect.signature(function).parameters.values())
    if native:
        if not parameters or parameters[0].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise RewardError(f"reward {name!r} is marked native and takes no sample; f(sample)")
        parameters = parameters[1:]
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {p.name for p in parameters if p.kind in keywords} - batch.LISTS - batch.EXTRAS
    for option in options:
        if option not in known:
            raise RecipeError(f"reward {name!r} has no option {option!r}; {nearest(option, known)}")
    needed = {p.name for p in parameters if p.kind in keywords and p.default is p.empty}
    if native and needed - options.keys():
        missing = ", ".join(sorted(needed - options.keys()))
        raise RewardError(
            f"reward {name!r} is marked native and called as f(sample), but also needs {missing}; "
            "set it in the recipe's entry, or give it a default"
        )


def _call_name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = function.__name__ if hasattr(function, "__name__") else type(function).__name__
    return "lambda" if name == "<lambda>" else name


def _metric_name(name: str) -> str:
    if not re.fullmatch(r"[\w.+-]+", name):
        raise RecipeError(
            f"reward.name is {name!r}; it becomes part of a metric's name, so it holds letters, "
            "digits and _ . + - only"
        )
    return name
