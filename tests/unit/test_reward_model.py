"""Reward models: the right position's score in any batch, the text they read, and refusals."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import (
    END,
    TEMPLATE,
    TEXT_END,
    VOCABULARY,
    architectures,
    llama_config,
    make_tokenizer,
    save_tiny,
)
from test_reward_grader import Entry, group, native, scores, values
from test_reward_resolve import documented, said
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

import surefoot
from surefoot.errors import ModelError, RecipeError, RewardError
from surefoot.recipe import load
from surefoot.records import ScoreStatus, StopReason
from surefoot.reward import Grader, RewardSample, resolve
from surefoot.reward.contract import PartScore
from surefoot.reward.model import FrozenModel, ModelOptions, ModelReward, Reading, batches
from surefoot.reward.reading import Reader

ROOT = Path(__file__).resolve().parents[2]
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
DECODERS = ("llama", "gpt2", "mistral_sliding", "qwen3", "gemma3", "bloom")
_UNCHANGED = object()


def bert_config() -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )


def save_reward_model(
    folder: Path, config: PreTrainedConfig | None = None, *, pad: Any = _UNCHANGED, seed: int = 0
) -> Path:
    """A random model with one label, and the character tokenizer without a chat template."""
    config = config or llama_config()
    config.num_labels = 1
    if pad is not _UNCHANGED:
        config.pad_token_id = pad
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward") / "llama")


def reward(folder: Path, **options: Any) -> ModelReward:
    return ModelReward(ModelOptions(path=str(folder), **options), name="model", base_dir=None)


def sample(
    text: str,
    prompt: str = "Q:",
    *,
    stop: StopReason = StopReason.STOP,
    messages: tuple[dict[str, str], ...] | None = None,
) -> RewardSample:
    return RewardSample(prompt, text, (5, 2), None, "default", {}, stop, messages)


# Lengths beyond the sliding window of 8, equal ones, an empty answer, an end in the middle.
SAMPLES = [
    sample("seven"),
    sample("the answer is seven, because four and three make seven"),
    sample("eleven"),
    sample(f"first{END} and then more", stop=StopReason.LENGTH),
    sample("", stop=StopReason.LENGTH),
    sample("twelve"),
    sample(
        "cut off in the mid", prompt="A longer question than the others: ", stop=StopReason.LENGTH
    ),
]


def numbers(verdicts: list[PartScore]) -> list[float]:
    assert all(verdict.status is ScoreStatus.SCORED for verdict in verdicts), verdicts
    return [float(verdict.value or 0.0) for verdict in verdicts]


def alone(folder: Path, sample: RewardSample) -> float:
    """What transformers gives for one unpadded text at its last position."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(folder)
    # Without a padding id its own forward reads the last position of a single row.
    model.config.pad_token_id = None
    ids = make_tokenizer()(sample.prompt + sample.text)["input_ids"]
    if sample.stop is StopReason.STOP:
        ids.append(2)
    with torch.no_grad():
        return float(model.eval()(input_ids=torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("pad", [2, None, 0], ids=["pad is eos", "no pad", "pad of its own"])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoders_score_is_that_of_the_text_alone(kind: str, pad: int | None, tmp_path: Path):
    folder = save_reward_model(tmp_path / "m", architectures()[kind], pad=pad)
    scorer = reward(folder)
    together = numbers(scorer(SAMPLES))
    assert scorer.model is not None and scorer.model.padded
    assert max(together) - min(together) > 0.05
    one_by_one = [numbers(scorer([given]))[0] for given in SAMPLES]
    assert together == pytest.approx(one_by_one, abs=1e-5)
    assert together == pytest.approx([alone(folder, given) for given in SAMPLES], abs=1e-5)


def test_the_librarys_own_forward_misses_where_padding_is_the_end(tmp_path: Path):
    """Else the tests above could not fail."""
    folder = save_reward_model(tmp_path / "m", pad=2)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = [*make_tokenizer()("Q:seven")["input_ids"], 2]
    with torch.no_grad():
        missed = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
    assert abs(missed - numbers(reward(folder)([sample("seven")]))[0]) > 1e-3


def test_an_encoder_is_called_on_rows_of_one_length(tmp_path: Path):
    folder = save_reward_model(tmp_path / "m", bert_config())
    scorer = reward(folder)
    together = numbers(scorer(SAMPLES))
    assert scorer.model is not None and not scorer.model.padded
    assert max(together) - min(together) > 0.05
    one_by_one = [numbers(scorer([given]))[0] for given in SAMPLES]
    assert together == pytest.approx(one_by_one, abs=1e-5)
    assert together == pytest.approx([alone(folder, given) for given in SAMPLES], abs=1e-5)


@pytest.mark.parametrize("budget", [1, 40, 100])
def test_the_budget_changes_no_score(budget: int, llama: Path):
    small = reward(llama, tokens_per_batch=budget)
    assert numbers(small(SAMPLES)) == pytest.approx(numbers(reward(llama)(SAMPLES)), abs=1e-5)


def test_scores_stay_with_their_samples(llama: Path):
    scorer = reward(llama)
    expected = dict(zip(map(id, SAMPLES), numbers(scorer(SAMPLES)), strict=True))
    shuffled = random.Random(3).sample(SAMPLES, len(SAMPLES))
    found = numbers(scorer(shuffled))
    assert found == pytest.approx([expected[id(given)] for given in shuffled], abs=1e-5)
    assert numbers(scorer(SAMPLES)) == numbers(scorer(SAMPLES))
    assert scorer([]) == []


def test_batches_by_hand():
    lengths = [5, 1, 3, 3, 9]
    readings = [Reading(i, [0] * length) for i, length in enumerate(lengths)]

    def indices(budget: int, *, equal: bool = False) -> list[list[int]]:
        return [[r.index for r in batch] for batch in batches(readings, budget, equal=equal)]

    assert indices(9) == [[1, 2, 3], [0], [4]]
    assert indices(9, equal=True) == [[1], [2, 3], [0], [4]]
    assert indices(4) == [[1], [2], [3], [0], [4]]
    assert indices(45) == [[1, 2, 3, 0, 4]]


def test_bfloat16_is_close_and_weights_are_frozen(llama: Path):
    scorer = reward(llama, dtype="bfloat16")
    low, high = numbers(scorer(SAMPLES)), numbers(reward(llama)(SAMPLES))
    assert low == pytest.approx(high, abs=0.2) and low != high
    assert scorer.model is not None
    model = scorer.model.model
    assert model.dtype is torch.bfloat16 and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    # A head in bfloat16 would give multiples of 2 ** -8 of its size.
    assert any(torch.tensor(v).bfloat16().item() != v for v in low)


def written(reader: Reader, given: RewardSample) -> str:
    ids = reader.read(given)
    assert isinstance(ids, list)
    return str(reader.tokenizer.decode(ids, skip_special_tokens=False))


def reader(tokenizer: Any = None, *, template: str = "auto") -> Reader:
    return Reader(
        tokenizer or make_tokenizer(), template=template, own=False, name="model", path="m"
    )


def plain_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def test_messages_are_written_by_the_models_own_template():
    assert written(reader(), sample("Yo", messages=CHAT)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n"
    )


def test_a_prompt_of_one_string_is_what_the_user_says():
    assert written(reader(), sample("Yo", prompt="Hi", stop=StopReason.LENGTH)) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (StopReason.STOP, "Yo", f"HiYo{END}"),
        (StopReason.LENGTH, "Yo", "HiYo"),
        (StopReason.STOP, f"Yo{END}", f"HiYo{END}"),
    ],
)
def test_without_a_template_texts_are_joined(stop: StopReason, text: str, expected: str):
    given = sample(text, prompt="Hi", stop=stop)
    assert written(reader(plain_tokenizer()), given) == expected
    assert written(reader(template="none"), given) == expected


def test_messages_without_a_template_are_refused_with_the_mend():
    with pytest.raises(RewardError, match=r"no chat template.*template to none"):
        reader(plain_tokenizer()).read(sample("Yo", messages=CHAT))
    joined = reader(plain_tokenizer(), template="none")
    assert written(joined, sample("Yo", prompt="Hi", messages=CHAT)) == f"HiYo{END}"


def test_no_start_is_written_twice():
    def with_start(template: str | None) -> Any:
        tokenizer = make_tokenizer()
        tokenizer.bos_token = TEXT_END
        tokenizer.chat_template = template
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{TEXT_END} $A", special_tokens=[(TEXT_END, 0)]
        )
        assert tokenizer("a")["input_ids"] == [0, *make_tokenizer()("a")["input_ids"]]
        return tokenizer

    cut = StopReason.LENGTH
    assert written(reader(with_start(None)), sample("Yo", prompt="Hi", stop=cut)) == (
        f"{TEXT_END}HiYo"
    )
    given = sample("Yo", prompt=f"{TEXT_END}Hi", stop=cut)
    assert written(reader(with_start(None)), given) == f"{TEXT_END}HiYo"
    own = reader(with_start("{{ bos_token }}" + TEMPLATE))
    text = written(own, sample("Yo", messages=CHAT))
    assert text.startswith(f"{TEXT_END}<|im_start|>system") and text.count(TEXT_END) == 1


def test_a_template_that_fails_and_a_text_of_nothing_are_missing_samples():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    failure = reader(tokenizer).read(sample("Yo"))
    assert isinstance(failure, PartScore) and "roles must alternate" in failure.detail
    nothing = reader(template="none").read(sample("", prompt="", stop=StopReason.LENGTH))
    assert isinstance(nothing, PartScore) and nothing.status is ScoreStatus.INFRA_ERROR


def test_a_text_beyond_the_context_is_missing_alone(tmp_path: Path):
    folder = save_reward_model(tmp_path / "m", llama_config(max_position_embeddings=16))
    # 2 of the prompt, the text, and the end.
    first, second, third = reward(folder)([sample("x" * 14), sample("x" * 13), sample("y")])
    assert first.status is ScoreStatus.INFRA_ERROR
    assert "17 tokens" in first.detail and "at most 16" in first.detail
    expected = numbers(reward(folder)([sample("x" * 13), sample("y")]))
    assert numbers([second, third]) == pytest.approx(expected, abs=1e-5)


def test_a_score_that_is_not_finite_is_missing_alone(tmp_path: Path):
    folder = save_reward_model(tmp_path / "m")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    broken = make_tokenizer()("z")["input_ids"][0]
    with torch.no_grad():
        model.base_model.get_input_embeddings().weight[broken] = float("nan")
    model.save_pretrained(folder)
    with Grader([Entry("model", options={"path": str(folder)})]) as grader:
        good, bad, other = scores(grader.score([group(["a long answer", "az", "b"])]))
    assert bad.status is ScoreStatus.INFRA_ERROR
    assert bad.detail == "model, sample 1: the reward model gave nan, which is no score"
    assert good.valid and other.valid and good.value != other.value


def test_a_batch_too_large_for_memory_is_halved(llama: Path, monkeypatch: pytest.MonkeyPatch):
    expected = numbers(reward(llama)(SAMPLES))
    real, sizes = FrozenModel.score, []

    def tight(self: FrozenModel, ids: Any) -> list[float]:
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, ids)

    scorer = reward(llama)
    scorer([])
    monkeypatch.setattr(FrozenModel, "score", tight)
    assert numbers(scorer(SAMPLES)) == pytest.approx(expected, abs=1e-5)
    assert sizes == [7, 3, 1, 2, 4, 2, 2]


def test_one_text_too_large_for_memory_is_missing_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    real = FrozenModel.score

    def tight(self: FrozenModel, ids: Any) -> list[float]:
        if max(map(len, ids)) > 55:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(self, ids)

    scorer = reward(llama)
    scorer([])
    monkeypatch.setattr(FrozenModel, "score", tight)
    verdicts = scorer(SAMPLES)
    assert [v.status is ScoreStatus.SCORED for v in verdicts] == [True, False, *[True] * 5]
    # 2 of the prompt, 54 of the text, and the end.
    assert "one text of 57 tokens" in verdicts[1].detail
    monkeypatch.setattr(FrozenModel, "score", lambda self, ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer(SAMPLES)


def test_beside_other_rewards_in_one_grader(llama: Path):
    parts = [
        Entry("model", name="helpful", weight=2.0, options={"path": llama.name}),
        native(lambda s: len(s.text), name="long", weight=0.5),
        Entry("numeric"),
    ]
    with Grader(parts, base_dir=llama.parent) as grader:
        scorer = grader.rewards[0].scorer
        assert isinstance(scorer, ModelReward) and scorer.model is None
        given = [group(["7", "so 17"]), group(["8"])]
        graded = grader.score(given)
        plain = numbers(
            reward(llama)([sample(text, prompt="How many?") for text in ("7", "so 17", "8")])
        )
        assert [score.parts["helpful"] for score in scores(graded)] == pytest.approx(plain)
        rest = [0.5 * 1 + 1, 0.5 * 5, 0.5 * 1]
        expected = [2 * own + other for own, other in zip(plain, rest, strict=True)]
        assert values(graded) == pytest.approx(expected)
        counts = grader.counts()
        assert counts["rewards/helpful/mean"] == pytest.approx(sum(plain) / 3)
        assert counts["rewards/helpful/missing"] == 0.0
        # The workers were forked before the model came, and go on.
        assert values(grader.score(given)) == pytest.approx(expected)


def test_a_recipes_entry_trains(llama: Path, tiny_model: Path, tmp_path: Path):
    recipe = {
        "model": {"path": str(tiny_model)},
        "data": {"source": "rows"},
        "reward": [{"use": "model", "path": str(llama), "tokens_per_batch": 64}],
        "method": {"name": "rloo", "group_size": 4},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
        "optim": {"learning_rate": 0.003},
        "run": {"dir": str(tmp_path / "run"), "steps": 2, "eval_every": 0, "trackers": []},
    }
    (found,) = resolve(load(recipe, outside=("data",)).reward)
    assert isinstance(found.scorer, ModelReward)
    run = surefoot.train(recipe, data=[{"prompt": f"say {c}"} for c in "abc"])
    rows = [row for row in run.metrics if "reward" in row]
    assert len(rows) == 2 and all(row["rewards/model/missing"] == 0.0 for row in rows)
    assert rows[0]["reward"] == pytest.approx(rows[0]["rewards/model/mean"])


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def broken_directories() -> Iterator[tuple[str, Any, str]]:
    def without(pattern: str) -> Any:
        def remove(folder: Path) -> None:
            for file in folder.glob(pattern):
                file.unlink()

        return remove

    def pickled(folder: Path) -> None:
        torch.save({}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    def two_labels(folder: Path) -> None:
        edit_config(folder, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})

    def translator(folder: Path) -> None:
        (folder / "config.json").unlink()
        T5Config(num_labels=1).save_pretrained(folder)

    yield "no config", without("config.json"), r"path: \S+ holds no config\.json"
    yield "pickled", pickled, r"path: \S+ holds only pickled weights \(pytorch_model\.bin\)"
    yield "no weights", without("*.safetensors"), "holds no weights"
    yield "no tokenizer", without("tokenizer*"), "holds no tokenizer"
    yield "two labels", two_labels, "describes 2 labels, and a reward model has one"
    yield "encoder-decoder", translator, "encoder-decoder"


@pytest.mark.parametrize(
    ("change", "message"),
    [pytest.param(change, message, id=name) for name, change, message in broken_directories()],
)
def test_a_directory_that_is_none_is_refused_before_anything_runs(
    change: Any, message: str, llama: Path, tmp_path: Path
):
    folder = copied(llama, tmp_path / "rm")
    change(folder)
    with pytest.raises(ModelError, match=message) as caught:
        Grader([Entry("model", name="helpful", options={"path": str(folder)})])
    assert str(caught.value).startswith("reward 'helpful': path: ")


def test_a_directory_has_no_revision(llama: Path):
    with pytest.raises(ModelError, match="has no revisions"):
        resolve([Entry("model", options={"path": str(llama), "revision": "main"})])


def test_a_path_that_leads_nowhere(tmp_path: Path):
    with pytest.raises(ModelError, match=r"reward 'model': path: there is no directory \./nope"):
        resolve([Entry("model", options={"path": "./nope"})], base_dir=tmp_path)


def test_a_head_that_was_never_trained_is_refused_by_name(tmp_path: Path):
    folder = edit_config(save_tiny(tmp_path / "policy"), id2label={"0": "LABEL_0"})
    edit_config(folder, label2id={"LABEL_0": 0})
    with (
        Grader([Entry("model", options={"path": str(folder)})]) as grader,
        pytest.raises(ModelError, match=r"does not hold 1 of the weights.*score\.weight"),
    ):
        grader.score([group(["a"])])


def test_a_model_whose_batches_differ_from_single_texts_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    real = FrozenModel.score
    monkeypatch.setattr(
        FrozenModel, "score", lambda self, ids: [v + len(ids) - 1 for v in real(self, ids)]
    )
    with pytest.raises(ModelError, match="LlamaForSequenceClassification"):
        reward(llama)(SAMPLES)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"options": {}}, "needs the option 'path'"),
        ({"options": {"path": "m", "dtyp": "float32"}}, "'dtyp'; did you mean 'dtype'"),
        ({"options": {"path": "m", "dtype": "int8"}}, "'float32' or 'bfloat16' or 'float64'"),
        ({"options": {"path": "m", "tokens_per_batch": 0}}, "tokens_per_batch is 0"),
        ({"options": {"path": "m", "template": "chatml"}}, "'auto' or 'none'"),
        ({"options": {"path": "m"}, "timeout": 60.0}, r"timeout is 60\.0.*leave it out"),
        ({"options": {"path": "m"}, "name": "a b"}, "name"),
    ],
)
def test_settings_that_cannot_work(entry: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        resolve([Entry("model", **entry)])


def test_the_page_names_its_options_and_defaults():
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    expected = {field.name: said(field) for field in dataclasses.fields(ModelOptions)}
    assert documented(page, "model") == expected
