"""The sections of a recipe and every key in them, with types, defaults and bounds.

Owns what one key may hold. A default lives here or in a method's row, nowhere else.
Refuses to own files and overrides (`text.py`), combinations of keys (`checks.py`), and what is
built (`built.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """1e3 is a whole number too; everything else is left for pydantic to judge."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


def _rates(value: Any) -> Any:
    """Two shares, or a message that says so."""
    value = _listed(value)
    numbers = isinstance(value, tuple) and all(
        isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1
        for rate in value
    )
    if value is not None and not (numbers and len(value) == 2):
        raise ValueError("must read [low, high], two shares from 0 to 1, as in [0.2, 0.8]")
    return value


def _window(value: tuple[float, float] | None) -> tuple[float, float] | None:
    if value is not None and value[0] > value[1]:
        raise ValueError("the low rate is above the high one")
    if value == (0, 1):
        raise ValueError("passes over nothing; leave it out")
    return value


def _address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("must begin with http:// or https://, as in http://127.0.0.1:8000/v1")
    if "@" in parts.netloc or parts.query:
        # It is written into the run directory, where no secret may be.
        raise ValueError("must hold no password and no query; put the key into the environment")
    return value


Whole = Annotated[int, BeforeValidator(_whole), Field(le=2**31 - 1)]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
DType = Literal["float32", "bfloat16", "float64"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Allowance = Literal[
    "truncated_sampling",
    "unisolated_code",
    "remote_code",
    "pickle",
    "clip_below_noise",
    "oversize",
]


class Section(BaseModel):
    """What all sections share: unknown keys refused, no silent conversions, frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class Lora(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: Annotated[Whole, Field(ge=1)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    targets: Words = ()
    """Names of the modules that get one; empty = every linear layer but the head."""
    path: str | None = None
    """A given adapter to start from."""


class Model(Section):
    """Which model is trained, and in which precision."""

    path: str = "smollm2-135m"
    """A directory, a Hugging Face id, or an alias: smollm2-135m, characters-1m, study."""
    revision: str | None = None
    """Revision of a Hugging Face id."""
    dtype: DType = "float32"
    """Precision of the stored weights and of the optimizer."""
    compute: DType | Literal["auto"] = "auto"
    """Precision of the matrix products; auto = dtype."""
    head_dtype: DType = "float32"
    """Precision of the LM head's products; the softmax is in float32 at least."""
    reference_dtype: DType | Literal["auto"] = "auto"
    """Precision of the reference copy; auto = dtype, so that its KL at step 0 is exactly 0."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    lora: Lora | None = None
    """Adapters; null = full fine-tuning."""
    template: str = "auto"
    """Chat template: auto = the model's own; none = prompts are used as they are."""
    system: str | None = None
    """System message for rows that bring none."""


class DataSource(Section):
    """One source of rows. Keys that are not listed here are the source's own `options`."""

    source: str
    """A built-in name (addition, reasoning_gym, rows), a path or a Hugging Face id."""
    split: str | None = None
    """Part of a dataset that has named parts; null = train, or the only one."""
    columns: Mapping[str, str] = Field(default_factory=dict)
    """What the row calls each of prompt, answer, task, ...: {prompt: question}."""
    task: str | None = None
    """Label of every row of this source; null = the row's own, else `default`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the stream relative to the other sources of a step."""
    from_step: Annotated[Whole, Field(ge=0)] = 0
    """First step at which this source is drawn from; steps count from 1."""
    until_step: Annotated[Whole, Field(ge=2)] | None = None
    """First step at which it is no longer drawn from; null = drawn from to the end."""
    max_prompt_tokens: Annotated[Whole, Field(ge=1)] | None = None
    """Longer prompts are dropped and counted; null = what the model's context leaves."""
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    """Longer rows are dropped and counted (supervised and preference)."""
    eval_size: Annotated[Whole, Field(ge=0)] = 0
    """Rows taken out of the stream for evaluation."""
    keep_solve_rate: Annotated[
        tuple[Share, Share] | None, BeforeValidator(_rates), AfterValidator(_window)
    ] = None
    """Pass over prompts whose own solve rate in this run lies outside [low, high]."""
    role: Literal["train", "eval"] = "train"
    """eval: every row is for evaluation."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """The source's own keys, validated by the data room."""


class RewardPart(Section):
    """One part of the score. Keys that are not listed here are the reward's own `options`."""

    use: str
    """A built-in name, package.module:function, or path/file.py:function."""
    weight: float = 1.0
    """Factor in the weighted sum; 0 = logged only."""
    name: str | None = None
    """Name in the metrics; null = derived from `use`."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds of wall clock for one sample (one call of a batch function)."""
    price: Annotated[float, Field(ge=0)] | None = None
    """US dollars per call, for the budget."""
    retries: Annotated[Whole, Field(ge=0)] = 1
    """Further attempts after a failure of the grader, within the deadline."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """The reward's own keys, validated by the reward room."""


class CriticModel(Section):
    """The value model of rows with a critic."""

    path: str | None = None
    """Model to start from; null = the policy's."""
    layers: Annotated[Whole, Field(ge=1)] | None = None
    """Number of lower layers kept; null = all."""
    share_trunk: bool = False
    """Put the value head on the policy's own layers."""
    init: str | None = None
    """A saved critic, or stage:NAME."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Its own step size; null = optim.learning_rate."""


class Rollout(Section):
    """How completions are sampled."""

    engine: Literal["local", "vllm"] = "local"
    """local: in this process; vllm: a server, by HTTP."""
    dtype: DType | Literal["auto"] = "auto"
    """Precision of sampling; auto = bfloat16 where model.compute is, else model.dtype."""
    prompts_per_step: Annotated[Whole, Field(ge=1)] = 8
    """P: prompts of one step; each gets method.group_size completions."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits when sampling and in every log-probability."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; below 1 needs truncated_sampling in run.allow."""
    top_k: Annotated[Whole, Field(ge=0)] = 0
    """Most likely tokens kept; 0 = all; above 0 needs truncated_sampling in run.allow."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least share of the top probability; above 0 needs truncated_sampling in run.allow."""
    max_new_tokens: Annotated[Whole, Field(ge=1)] = 256
    """Cap on a completion, in tokens."""
    min_new_tokens: Annotated[Whole, Field(ge=0)] = 0
    """Tokens before an end-of-sequence id may be drawn."""
    stop: Words = ()
    """Strings that end a completion."""
    rows: Annotated[Whole, Field(ge=1)] | Literal["auto"] = "auto"
    """Completions decoded at once; auto = prompts_per_step times group_size."""
    ahead: Annotated[Whole, Field(ge=0, le=1)] = 0
    """Steps by which sampling may run ahead of the weights."""
    urls: Words = ()
    """Servers of the vllm engine."""


class Optim(Section):
    """AdamW, its schedule, and the size of a micro-batch."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Step size after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after warm-up; linear and cosine fall to 0 at run.steps."""
    warmup_steps: Annotated[Whole, Field(ge=0)] = 0
    """Steps over which the step size rises linearly from 0."""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_listed)] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient is scaled down to this norm; null = never."""
    tokens_per_microbatch: Annotated[Whole, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens forwarded with gradient at once; changes memory and time, not the gradient."""
    batch_size: Annotated[Whole, Field(ge=1)] | None = None
    """Examples or pairs per step (supervised and preference only, there 16 unless given)."""
    offload: bool = False
    """Keep the optimizer's state in host memory."""


class Run(Section):
    """Length, seed, bookkeeping and permissions of one run."""

    dir: str | None = None
    """Run directory; null = runs/ and the recipe's file name."""
    steps: Annotated[Whole, Field(ge=1)] | None = None
    """Rollout steps; required for online methods."""
    epochs: Annotated[Whole, Field(ge=1)] | None = None
    """Passes over the data (supervised and preference only, there 1 unless steps are given; the
    shorter of both)."""
    seed: Annotated[Whole, Field(ge=0)] = 0
    """Key of every random draw."""
    eval_every: Annotated[Whole, Field(ge=0)] = 0
    """Steps between evaluations; 0 = never."""
    checkpoint_every: Annotated[Whole, Field(ge=0)] = 50
    """Steps between checkpoints; 0 = only at the end and when stopped."""
    keep: Annotated[Whole, Field(ge=1)] = 2
    """Checkpoints kept, newest first."""
    grace: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Seconds after SIGTERM, SIGUSR1 or Ctrl-C within which the run saves and ends."""
    samples: Annotated[Whole, Field(ge=1)] | Literal["all"] = 8
    """Completions of a step that samples.jsonl keeps; all, where pairs are to be made of them."""
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(_listed)] = ("tensorboard",)
    """Where metrics also go; an empty list = nowhere but the run directory."""
    stop_without_signal: Annotated[Whole, Field(ge=1)] | Literal["never"] = 10
    """Steps in a row without any signal after which the run stops; never for controls."""
    stop_at_failure_rate: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a step's samples with a failed grader from which on the run stops."""
    stop_at_mismatch: Annotated[float, Field(gt=0)] | Literal["never"] = 1.0
    """Nats a token between engine and trainer at equal weights from which on the run stops; unread
    where truncated_sampling is allowed, which sets them apart."""
    allow: Annotated[tuple[Allowance, ...], BeforeValidator(_listed)] = ()
    """Names of what is otherwise refused."""
    allow_change: Words = ()
    """Keys that may differ from the run being resumed although they change what is learned."""


class Doctor(Section):
    """What the doctor may do about a finding while the run goes."""

    action: Literal["report", "stop"] = "report"
    """report: write the finding; stop: save and stop the run."""


class Judge(Section):
    """An LLM judge by HTTP, and what it may cost."""

    base_url: Annotated[str, AfterValidator(_address)] | None = None
    """Address of an OpenAI-compatible server."""
    model: str | None = None
    """Its model."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself is never written down."""
    temperature: Annotated[float, Field(ge=0)] | None = 0.0
    """Of the judge; null = not sent, for models that refuse it."""
    max_tokens: Annotated[Whole, Field(ge=1)] = 512
    """Cap on a reply, in tokens."""
    concurrency: Annotated[Whole, Field(ge=1)] = 8
    """Requests under way at once."""
    timeout: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Seconds for one request."""
    deadline: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Seconds for one verdict, with all requests and waits that it takes."""
    price_per_million_input: Annotated[float, Field(ge=0)] | None = None
    """US dollars for a million tokens that the judge reads."""
    price_per_million_output: Annotated[float, Field(ge=0)] | None = None
    """US dollars for a million tokens that it writes."""
    budget_calls: Annotated[Whole, Field(ge=0)] | None = None
    """Requests that the run may send, resumed or not; then it stops."""
    budget_usd: Annotated[float, Field(ge=0)] | None = None
    """US dollars that the run may cost, resumed or not; then it stops. Needs the prices."""


SECTIONS: Mapping[str, type[Section]] = {
    "model": Model,
    "critic": CriticModel,
    "rollout": Rollout,
    "optim": Optim,
    "run": Run,
    "doctor": Doctor,
    "judge": Judge,
}
"""Sections that are one mapping; `data`, `reward`, `method` and `stages` are read apart."""

KEYS: tuple[str, ...] = (
    "model",
    "data",
    "reward",
    "method",
    "critic",
    "rollout",
    "optim",
    "run",
    "doctor",
    "judge",
    "stages",
)
"""Top-level keys, in the order in which a recipe is written."""
