"""The built-in reward `model`: the one number that a trained reward model gives a conversation.

Owns its options, loading it (safetensors, one label, no weight made up), batches under a token
budget, and the position whose score counts, whatever the padding.
Refuses to own the ids that it reads (`reading.py`), and training one.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from surefoot.errors import ModelError
from surefoot.models.load import DTYPES, context_of, resolve_directory
from surefoot.models.memory import out_of_memory
from surefoot.models.reward_model import BIAS_KEY
from surefoot.reward.contract import PartScore, RewardSample, failed, scored
from surefoot.reward.reading import Reader

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_CHECKED_LENGTHS = (3, 7)
# Relative and absolute; a bfloat16 decoder differs from itself by as much between two batches.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`path` is a directory (relative to the recipe, then to the cwd) or a Hugging Face id.

    `template`: auto is the reward model's own chat template, none joins the texts as they are.
    """

    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    tokens_per_batch: int = 8192
    template: Literal["auto", "none"] = "auto"

    def __post_init__(self) -> None:
        if self.tokens_per_batch < 1:
            raise ValueError(
                f"tokens_per_batch is {self.tokens_per_batch}; it is a number of tokens from 1 on"
            )


@dataclass(frozen=True, slots=True)
class Reading:
    """The ids of one sample, and its place among the samples of a call."""

    index: int
    ids: Sequence[int]


def batches(
    readings: Sequence[Reading], budget: int, *, equal: bool
) -> Iterator[Sequence[Reading]]:
    """Shortest first, each batch within `budget` tokens once padded; what is longer stands alone.

    `equal`: all of one batch have the same length.
    """
    batch: list[Reading] = []
    for reading in sorted(readings, key=lambda reading: len(reading.ids)):
        full = (len(batch) + 1) * len(reading.ids) > budget
        other = equal and bool(batch) and len(batch[0].ids) != len(reading.ids)
        if batch and (full or other):
            yield batch
            batch = []
        batch.append(reading)
    if batch:
        yield batch


class ModelReward:
    """Scores samples with a frozen sequence-classification model, in this process.

    Construction reads config and tokenizer, so that what cannot work is refused before anything
    runs; the first call loads the weights.
    """

    def __init__(self, options: ModelOptions, *, name: str, base_dir: Path | None) -> None:
        self.options = options
        self.name = name
        self.folder = self._find(base_dir)
        self.config, tokenizer = self._open()
        self.context = context_of(self.config.get_text_config())
        self.reader = Reader(
            tokenizer,
            template=options.template,
            own=BIAS_KEY in self.config.to_dict(),
            name=name,
            path=options.path,
        )
        self.model: FrozenModel | None = None

    def __call__(self, samples: Sequence[RewardSample]) -> list[PartScore]:
        if self.model is None:
            self.model = self._load()
        verdicts: dict[int, PartScore] = {}
        readings = []
        for index, sample in enumerate(samples):
            read = self.reader.read(sample)
            if isinstance(read, PartScore):
                verdicts[index] = read
            elif len(read) > self.context:
                verdicts[index] = failed(
                    f"prompt and answer are {len(read)} tokens, and the reward model reads at most "
                    f"{self.context}; lower rollout.max_new_tokens or data.max_prompt_tokens"
                )
            else:
                readings.append(Reading(index, read))
        budget = self.options.tokens_per_batch
        for batch in batches(readings, budget, equal=not self.model.padded):
            judged = _judge(self.model, [reading.ids for reading in batch])
            verdicts |= zip((reading.index for reading in batch), judged, strict=True)
        return [verdicts[index] for index in range(len(samples))]

    def _find(self, base_dir: Path | None) -> str:
        found = resolve_directory(self.options.path, base_dir, key=self._key)
        folder = Path(found)
        if folder.is_dir():
            if self.options.revision is not None:
                raise self._refusal("is a directory, which has no revisions; leave revision out")
            if not any(folder.glob("*.safetensors")):
                raise self._refusal("holds no weights (*.safetensors); save the model into it")
            if not any((folder / name).is_file() for name in _TOKENIZERS):
                raise self._refusal("holds no tokenizer; save the reward model's own beside it")
        return found

    def _open(self) -> tuple[Any, Any]:
        where = {"revision": self.options.revision, "trust_remote_code": False}
        try:
            config = AutoConfig.from_pretrained(self.folder, **where)
            tokenizer = AutoTokenizer.from_pretrained(self.folder, **where)
        except Exception as error:  # the libraries raise whatever their readers do
            raise self._refusal(f"cannot be loaded ({_first_line(error)})") from error
        if config.num_labels != 1:
            raise self._refusal(
                f"describes {config.num_labels} labels, and a reward model has one; name a model "
                "that was trained with num_labels=1"
            )
        if config.is_encoder_decoder:
            raise self._refusal(
                "is an encoder-decoder; name a decoder with a score head, or an encoder"
            )
        return config, tokenizer

    def _load(self) -> FrozenModel:
        transformers.utils.logging.disable_progress_bar()
        dtype = DTYPES[self.options.dtype]
        try:
            # Wrong shapes are let through here only to be refused below, by name.
            model, info = AutoModelForSequenceClassification.from_pretrained(
                self.folder,
                config=self.config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                revision=self.options.revision,
                trust_remote_code=False,
            )
        except Exception as error:  # the libraries raise whatever their readers do
            raise self._refusal(f"cannot be loaded ({_first_line(error)})") from error
        lacking = _lacking(info)
        if lacking:
            raise self._refusal(
                f"does not hold {len(lacking)} of the weights that its config.json describes, in "
                f"their shape ({lacking[0]} is the first), so they would be random; name a model "
                "that was trained and saved as a reward model"
            )
        frozen = FrozenModel(model)
        if not frozen.agrees():
            raise self._refusal(
                f"is a {type(model).__name__}, which does not give a text the same score in a "
                "batch as alone; name a decoder with a score head, or an encoder"
            )
        if not frozen.padded:
            # Where positions start behind the padding id, only the tokenizer knows the limit.
            self.context = min(self.context, self.reader.tokenizer.model_max_length)
        return frozen

    @property
    def _key(self) -> str:
        return f"reward {self.name!r}: path"

    def _refusal(self, what: str) -> ModelError:
        return ModelError(f"{self._key}: {self.options.path} {what}")


class FrozenModel:
    """A model in eval mode that gives rows of ids one number each.

    A decoder's score is that of the last real token, found by the known length: transformers' own
    forward looks for the padding id instead, and misses where an end-of-sequence id is also the
    padding id or where there is none. Any other model is called on rows of one length, in which
    nothing is padded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False).eval()
        self.padded = "score" in dict(model.named_children()) and model.base_model is not model
        # In bfloat16 a head would round scores so much that different answers tie.
        self.head_dtype = torch.promote_types(model.dtype, torch.float32)
        self.bias = float(model.config.to_dict().get(BIAS_KEY, 0.0))
        """Of a normalised model that was trained here; the classifier has no place for it."""
        head = model.get_submodule("score") if self.padded else torch.nn.Identity()
        self.head = copy.deepcopy(head).to(self.head_dtype)

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """One number each; not finite where the model's is not."""
        lengths = [len(row) for row in ids]
        width = max(lengths)
        assert self.padded or min(lengths) == width, lengths
        device = self.model.device
        ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids], device=device)
        last_B = torch.tensor(lengths, device=device) - 1
        position_BT = torch.arange(width, device=device).expand_as(ids_BT)
        mask_BT = (position_BT <= last_B[:, None]).long()
        with torch.no_grad():
            if self.padded:
                score_B = self._at(ids_BT, mask_BT, position_BT, last_B)
            else:
                score_B = self.model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, 0]
        return [value + self.bias for value in score_B.double().tolist()]

    def _at(self, ids_BT: Tensor, mask_BT: Tensor, position_BT: Tensor, last_B: Tensor) -> Tensor:
        base = self.model.base_model
        extras = {"position_ids": position_BT, "use_cache": False}
        taken = inspect.signature(base.forward).parameters
        hidden_BTH = base(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            **{name: value for name, value in extras.items() if name in taken},
        ).last_hidden_state
        hidden_BH = hidden_BTH[torch.arange(len(last_B), device=last_B.device), last_B]
        score_B1: Tensor = self.head(hidden_BH.to(self.head_dtype))
        return score_B1[:, 0]

    def agrees(self) -> bool:
        """Whether rows in a batch have the scores that the model's own forward gives each alone."""
        vocabulary = self.model.config.get_text_config().vocab_size
        lengths = _CHECKED_LENGTHS if self.padded else _CHECKED_LENGTHS[-1:] * 2
        # The padding id is left out: the model's own forward would pass over it.
        pad = self.model.config.get_text_config().pad_token_id
        usable = [id for id in range(min(vocabulary, 64)) if id != pad]
        rows = [[usable[(5 * k + n) % len(usable)] for k in range(n)] for n in lengths]
        rows[0].reverse()
        tolerance = _TOLERANCE[self.model.dtype]
        for row, value in zip(rows, self.score(rows), strict=True):
            ids = torch.tensor([row], device=self.model.device)
            with torch.no_grad():
                alone = float(self.model(input_ids=ids).logits[0, 0]) + self.bias
            if not math.isclose(value, alone, rel_tol=tolerance, abs_tol=tolerance):
                return False
        return True


def _judge(model: FrozenModel, ids: Sequence[Sequence[int]]) -> list[PartScore]:
    """A batch that does not fit in memory is halved, down to one text."""
    values = None
    try:
        values = model.score(ids)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    if values is not None:
        return [_verdict(value) for value in values]
    # After the handler, whose traceback holds on to the tensors of the attempt.
    if len(ids) == 1:
        return [failed(f"no memory to score one text of {len(ids[0])} tokens")]
    half = len(ids) // 2
    return _judge(model, ids[:half]) + _judge(model, ids[half:])


def _verdict(value: float) -> PartScore:
    if not math.isfinite(value):
        return failed(f"the reward model gave {value}, which is no score")
    return scored(value)


def _lacking(info: Mapping[str, Any]) -> list[str]:
    return sorted(info["missing_keys"]) + sorted(entry[0] for entry in info["mismatched_keys"])


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
