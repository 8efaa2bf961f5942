"""Responses of records: behind the prompt's tokens, with the chat template's own words between turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tiny import FAMILY_NAMES, tiny_processor
from vlm_pg.errors import SampleError
from vlm_pg.prompts.chat import render_chat
from vlm_pg.prompts.responses import ResponseBuilder
from vlm_pg.types import Prompt, Sample

SAMPLE = Sample(
    "1", "What?", (), ("A. red", "B. blue"), "B", "multiple_choice", "test", "test", "<think>It is blue.</think>"
)
TALK = replace(SAMPLE, turns=("It is blue.", "Are you sure?", "Yes.", "And now?", "Green."))


def prompt_with(text: str = "<|im_start|>assistant\n") -> Prompt:
    return Prompt("1", None, None, None, text=text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "process, answer, expected",
    [
        ("<think>It is blue.</think>", "B", "<think>It is blue.</think>\n<answer>B</answer>"),
        ("It is blue.", "B", "<think>It is blue.</think>\n<answer>B</answer>"),
        ("", "B", "<answer>B</answer>"),
    ],
)
def test_an_answer_follows_its_process(process: str, answer: str, expected: str) -> None:
    sample = replace(SAMPLE, process=process, answer=answer)
    assert sample.response == expected
    processor = tiny_processor()
    response = ResponseBuilder(processor, 100).build(sample, prompt_with())
    assert processor.tokenizer.decode(response.token_ids) == f"{expected}<|im_end|>"
    assert response.loss_mask is None and response.num_trained == len(response.token_ids)
    assert response.text == expected and response.finish_reason == "stop"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_conversation_reads_as_the_chat_template_writes_it(family: str) -> None:
    """Prompt and response together are the rendered conversation, and the loss is on the assistant's words."""
    processor = tiny_processor(family)
    tokenizer = getattr(processor, "tokenizer", processor)
    is_text = tokenizer is processor
    contents = [SAMPLE.question, *TALK.turns]
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": text if is_text else [{"type": "text", "text": text}]}
        for i, text in enumerate(contents)
    ]
    whole = render_chat(processor, messages)
    asked = render_chat(processor, messages[:1], add_generation_prompt=True)
    response = ResponseBuilder(processor, 200).build(TALK, prompt_with(asked))
    assert asked + tokenizer.decode(response.token_ids) == whole.rstrip("\n")
    assert response.loss_mask is not None and response.num_trained == int(response.loss_mask.sum())
    trained = tokenizer.decode(response.token_ids[response.loss_mask])
    assert trained == "It is blue.<|im_end|>Yes.<|im_end|>Green.<|im_end|>"


def test_a_thought_that_the_prompt_begins_is_not_begun_again() -> None:
    processor = tiny_processor()
    builder = ResponseBuilder(processor, 100)
    opened = prompt_with("<|im_start|>assistant\n<think>\n")
    sample = replace(SAMPLE, process="<think>\nIt is blue.\n</think>")
    text = processor.tokenizer.decode(builder.build(sample, opened).token_ids)
    assert text == "It is blue.\n</think>\n<answer>B</answer><|im_end|>"
    with pytest.raises(SampleError, match=r"begins responses with <think>, and this one has no thought\. A 'process'"):
        builder.build(replace(sample, process=""), opened)


def test_thoughts_of_later_turns_are_not_begun_again_either() -> None:
    processor = tiny_processor()
    opening = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    usual = processor.chat_template
    start = usual.rindex("{% if add_generation_prompt %}")
    processor.chat_template = usual[:start] + opening
    turns = ("<think>\nOne.\n</think>\nBlue.", "Sure?", "<think>\nTwo.\n</think>\nYes.")
    opened = prompt_with("<|im_start|>assistant\n<think>\n")
    response = ResponseBuilder(processor, 200).build(replace(SAMPLE, turns=turns), opened)
    assert processor.tokenizer.decode(response.token_ids).count("<think>") == 1
    with pytest.raises(SampleError, match=r"this one has no thought"):
        ResponseBuilder(processor, 200).build(replace(SAMPLE, turns=(*turns[:2], "Yes.")), opened)


def test_a_user_may_say_the_words_that_stand_for_turns() -> None:
    processor = tiny_processor()
    talk = replace(SAMPLE, turns=("Blue.", "Repeat the assistant's turn and the user's turn.", "Blue."))
    response = ResponseBuilder(processor, 200).build(talk, prompt_with())
    text = processor.tokenizer.decode(response.token_ids)
    assert text.count("<|im_start|>user") == 1 and "Repeat the assistant's turn and the user's turn." in text


def test_what_cannot_be_taught_is_refused() -> None:
    processor = tiny_processor()
    assert len(ResponseBuilder(processor, 100).build(SAMPLE, prompt_with()).token_ids) > 12
    with pytest.raises(SampleError, match=r"the response has \d+ tokens\. At most 12 are allowed") as caught:
        ResponseBuilder(processor, 12).build(SAMPLE, prompt_with())
    assert caught.value.reason == "response_too_long"
    with pytest.raises(SampleError, match=r"control token '<\|im_start\|>'"):
        ResponseBuilder(processor, 100).build(replace(SAMPLE, turns=("<|im_start|>user",)), prompt_with())


def test_a_pair_needs_a_rejected_response() -> None:
    builder = ResponseBuilder(tiny_processor(), 100)
    chosen, rejected = builder.pair(replace(SAMPLE, rejected="Red."), prompt_with())
    assert chosen.text == SAMPLE.response and rejected.text == "Red."
    with pytest.raises(SampleError, match=r"no 'rejected' response.*trains on pairs.*Add one"):
        builder.pair(SAMPLE, prompt_with())
