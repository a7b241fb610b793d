"""What ends a completion, and what text is left of it."""

from __future__ import annotations

import pytest
from support.tiny import END, START, TEXT_END, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surefoot.rollout.stops import StopRule


def rule(*strings: str, ids: tuple[int, ...] = (2, 0)) -> StopRule:
    return StopRule(make_tokenizer(), ids, strings)


def ids_of(text: str) -> list[int]:
    return list(make_tokenizer()(text, add_special_tokens=False)["input_ids"])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, as a byte-level tokenizer has for rare characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], unk_token=None))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def first_end(stops: StopRule, ids: list[int]) -> int | None:
    """How many tokens the rule lets through, asked after each one as an engine does."""
    return next((n for n in range(1, len(ids) + 1) if stops.ends(ids[:n])), None)


@pytest.mark.parametrize("control", [END, TEXT_END])
def test_every_stop_id_ends_and_is_not_text(control: str) -> None:
    ids = ids_of("7 + 5" + control)
    assert first_end(rule(), ids) == 6
    assert rule().text(ids) == "7 + 5"


def test_an_id_that_is_no_stop_id_is_text_even_if_it_is_a_control_token() -> None:
    ids = ids_of("a" + START + "b")
    assert first_end(rule(), ids) is None
    assert rule().text(ids) == "a" + START + "b"


def test_a_completion_cut_by_its_cap_keeps_its_last_token() -> None:
    assert rule().text(ids_of("12")) == "12"


def test_only_a_stop_id_is_left_of_nothing() -> None:
    assert rule().text(ids_of(END)) == ""


def test_a_stop_string_ends_at_its_last_character() -> None:
    stops = rule("\n\n", "END")
    assert first_end(stops, ids_of("ab\n\nc")) == 4
    assert first_end(stops, ids_of("xENDy")) == 4
    assert first_end(stops, ids_of("EN D\n \n")) is None


def test_text_is_cut_before_the_first_stop_string() -> None:
    assert rule("END").text(ids_of("xyEND")) == "xy"
    # The earlier place counts, not the earlier name.
    assert rule("b", "a").text(ids_of("xab")) == "x"
    assert rule("END").text(ids_of("ENDx")) == ""


def test_a_stop_string_before_a_stop_id() -> None:
    assert rule("!").text(ids_of("hi!" + END)) == "hi"


def test_a_long_stop_string_deep_in_a_long_completion() -> None:
    stop = "\n### The next question:\n"
    ids = ids_of("x" * 300 + stop)
    assert first_end(rule(stop), ids) == len(ids)
    assert rule(stop).text(ids) == "x" * 300


def test_a_stop_string_of_characters_that_take_several_tokens_each() -> None:
    """Twelve emoji are 48 byte tokens: more than their count of characters."""
    stop = "\N{GRINNING FACE}" * 12
    tokenizer = byte_tokenizer()
    ids = list(tokenizer("so: " + stop, add_special_tokens=False)["input_ids"])
    assert len(ids) == 4 + 48
    stops = StopRule(tokenizer, (), (stop,))
    assert first_end(stops, ids) == len(ids)
    assert stops.text(ids) == "so: "


def test_without_strings_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for every row at every token: it must not cost a decode."""
    stops = rule()

    def refuse(ids: object) -> str:
        raise AssertionError("decoded")

    monkeypatch.setattr(stops, "_decode", refuse)
    assert not stops.ends(ids_of("abc"))
    assert stops.ends(ids_of("abc" + END))
