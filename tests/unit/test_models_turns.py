"""Turns in ids: where they begin and end, one end token each, on real tokenizers and templates."""

from __future__ import annotations

import pytest
from example_tools import (
    MARKED,
    TOKENIZERS,
    encoder,
    shared_encoder,
    shared_tokenizer,
    starting_tokenizer,
    tokenizer,
    words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import CHARACTERS

from surefoot.errors import ModelError
from surefoot.models.template import PromptTemplate
from surefoot.models.turns import ExampleTemplate

END = "<|im_end|>"
USER = {"role": "user", "content": "What is 2 + 2?"}
TALK = [
    USER,
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six, I think."},
]
# Of an earlier turn only the role is left, as where thoughts are cut from the history.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] != 'assistant' or loop.last %}{{ message['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPACED = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} <|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def runs(trained, ids, name="tiny"):
    """The text of each stretch of trained tokens."""
    found, run = [], []
    for id, flag in zip([*ids, None], [*trained, False], strict=True):
        if flag:
            run.append(id)
        elif run:
            found.append(words(name, run))
            run = []
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_completion_is_its_text_and_one_end_token(name, data):
    # SmolLM2's vocabulary lacks some control bytes and those of two high planes; they get lost.
    broad = st.characters(codec="utf-8", max_codepoint=0xFFFF, exclude_categories=["Cc", "Cs"])
    letters = CHARACTERS if name == "tiny" else broad | st.just("\n")
    texts = st.text(alphabet=letters, max_size=30)
    question, answer = data.draw(texts.filter(str.strip)), data.draw(texts)
    prompt = [{"role": "user", "content": question}]
    ids, _ = shared_encoder(name).completion(prompt, answer)
    assert words(name, ids) == answer + END


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("answer", ["Four.", " four", "4\n", "", "2+2=4 — naïve"])
def test_prompt_and_completion_are_the_whole_conversation(name, answer):
    if name == "tiny" and not answer.isascii():
        pytest.skip("a letter that the tiny tokenizer lacks")
    own, coder = shared_tokenizer(name), shared_encoder(name)
    ids, apart = coder.completion([USER], answer)
    whole = own.apply_chat_template(
        [USER, {"role": "assistant", "content": answer}], tokenize=False
    )
    assert whole.endswith(f"{END}\n")
    expected = own(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    assert not apart
    assert [*coder.encode([USER]), *ids] == expected


def test_a_token_across_prompt_and_answer_leaves_the_prompt_as_in_a_rollout():
    own, coder = shared_tokenizer("smollm2"), shared_encoder("smollm2")
    prompt = coder.encode([USER])
    assert words("smollm2", prompt).endswith("assistant\n")
    whole = coder.render([USER]) + "\n\nFour."
    assert own(whole, add_special_tokens=False)["input_ids"][: len(prompt)] != list(prompt)
    ids, apart = coder.completion([USER], "\n\nFour.")
    assert apart
    assert words("smollm2", ids) == f"\n\nFour.{END}"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_turn_from_the_first_asked_for_is_trained_with_its_end(name):
    coder = shared_encoder(name)
    ids, trained, apart = coder.conversation(TALK, first=0)
    assert not apart
    assert runs(trained, ids, name) == [f"Four.{END}", f"Six, I think.{END}"]
    ids, trained, _ = coder.conversation(TALK, first=2)
    assert runs(trained, ids, name) == [f"Six, I think.{END}"]
    assert words(name, ids).endswith(f"Six, I think.{END}")


def test_what_follows_the_last_turn_is_left_out():
    coder = shared_encoder("tiny")
    assert coder.conversation(TALK[:3], first=0) == coder.conversation(TALK[:2], first=0)


def test_a_template_that_rewrites_the_past_is_refused_by_message():
    coder = encoder(template=FORGETFUL)
    with pytest.raises(ModelError, match=r"before message 3 differently once it is answered"):
        coder.conversation(TALK, first=0)
    ids, trained, _ = coder.conversation(TALK, first=3)
    assert runs(trained, ids) == [f"Six, I think.{END}"]


def test_a_conversation_that_begins_with_the_assistant_is_refused():
    with pytest.raises(ModelError, match="message 0 has role 'assistant'"):
        shared_encoder("tiny").conversation(TALK[1:], first=0)


def test_without_an_end_in_the_template_the_end_of_sequence_is_added_behind_the_words():
    coder = encoder(template=ENDLESS)
    ids, _ = coder.completion([USER], "Four.")
    assert words("tiny", ids) == f"Four.{END}"
    ids, trained, _ = coder.conversation(TALK, first=0)
    assert runs(trained, ids) == ["Four.", f"Six, I think.{END}"]


def test_white_space_that_the_template_writes_before_the_end_stays():
    coder = encoder(template=SPACED)
    ids, _ = coder.completion([USER], "Four.")
    assert words("tiny", ids) == f"Four. {END}"


@pytest.mark.parametrize(
    ("inside", "outside"), [("", f"{END}\n"), (END, "\n"), (f"{END}\n", ""), ("", "\n")]
)
def test_generation_markers_are_followed_and_the_end_token_is_trained(inside, outside):
    coder = encoder(template=MARKED.replace("INSIDE", inside).replace("OUTSIDE", outside))
    ids, trained, apart = coder.conversation(TALK, first=0)
    inner = "Four." if END not in inside + outside else f"Four.{END}"
    assert runs(trained, ids) == [inner, f"Six, I think.{END}"]
    assert words("tiny", ids).endswith(f"Six, I think.{END}")
    assert not apart


def test_markers_that_mark_nothing_are_refused():
    template = MARKED.replace("== 'assistant'", "== 'nobody'")
    with pytest.raises(ModelError, match="mark no token"):
        encoder(template=template).conversation(TALK, first=0)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_document_has_one_end(name):
    coder = shared_encoder(name)
    assert words(name, coder.document("one two", ends=True)) == f"one two{END}"
    assert words(name, coder.document("one two", ends=False)) == "one two"
    assert words(name, coder.document(f"one two{END}", ends=True)) == f"one two{END}"
    assert words(name, coder.document(f"one two{END}{END}", ends=True)) == f"one two{END}"


def test_there_is_one_start_token():
    own = starting_tokenizer()
    coder = ExampleTemplate(PromptTemplate(own, template="none", max_context=99))
    start = "<|im_start|>"
    assert own("ab")["input_ids"][0] == 1
    for text in ("ab", f"{start}ab"):
        assert words("tiny", coder.document(text, ends=True)) == f"{start}ab{END}"
        assert words("tiny", coder.encode(text)) == f"{start}ab"
    ids, apart = coder.completion("ab", "cd")
    assert (words("tiny", ids), apart) == (f"cd{END}", False)
    # The template's own text already holds every control token.
    templated = ExampleTemplate(PromptTemplate(own, template="auto", max_context=99))
    ids, _, _ = templated.conversation(TALK[:2], first=0)
    assert words("tiny", ids).count(start) == 2


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("prompt", "answer"), [("2 + 2 =", " 4"), ("un", "believable"), ("a\n", "\nb"), ("q ", " a ")]
)
def test_plain_text_is_continued_from_the_very_prompt(name, prompt, answer):
    coder, own = shared_encoder(name, plain=True), shared_tokenizer(name)
    ids, apart = coder.completion(prompt, answer)
    assert words(name, ids) == answer + END
    whole = own(prompt + answer)["input_ids"]
    assert apart == ([*coder.encode(prompt), *ids[:-1]] != whole)


def test_a_tokenizer_without_any_end_is_refused():
    own = tokenizer("tiny")
    own.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        ExampleTemplate(PromptTemplate(own, template="none", max_context=9))
    # The template's own end is enough.
    coder = ExampleTemplate(PromptTemplate(own, template="auto", max_context=9))
    assert words("tiny", coder.completion([USER], "a")[0]) == f"a{END}"
