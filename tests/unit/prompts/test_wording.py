"""A builder asks in the words that a wording gives, and lets the answer begin as it is told."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.asking import choice
from tests.support.tiny import tiny_processor
from vlm_pg.errors import ModelError, SampleError
from vlm_pg.eval.protocols.load import load_protocol
from vlm_pg.eval.wording import wording_of
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.prompts.turn import Turn
from vlm_pg.types import Cue, DecodedMedia, MediaRef, Sample

VISION = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


def ones(input_ids, types, grid_thw, kinds, seconds):
    return torch.arange(len(input_ids)).expand(3, -1)


def video() -> DecodedMedia:
    frames = np.zeros((4, 3, 56, 56), np.uint8)
    return DecodedMedia("video", frames, (0.0, 0.5, 1.0, 1.5), 2.0, "pyav", (Cue(0.4, 0.9, "Hello."),))


def test_system_and_user_are_the_wordings(processor) -> None:
    """The settings' own system message, instructions and subtitles do not appear."""
    seen: list[tuple[Sample, Sequence[DecodedMedia]]] = []

    def wording(sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, str]:
        seen.append((sample, media))
        return "Be brief.", "Who?\n"

    clip, sample = video(), choice()
    prompt = PromptBuilder(processor, PromptSettings(system="Not this."), ones, wording=wording).build(sample, [clip])
    assert seen == [(sample, [clip])]
    assert prompt.text == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{VISION}Who?\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.subtitles == ""


def test_without_a_system_message_the_template_decides(processor) -> None:
    def own(sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, str]:
        return "", PromptBuilder(processor, PromptSettings(subtitles=False), ones).question_text(sample)

    settings = PromptSettings(subtitles=False)
    default = PromptBuilder(processor, settings, ones).build(choice(), [video()])
    worded = PromptBuilder(processor, settings, ones, wording=own).build(choice(), [video()])
    assert worded.text == default.text
    assert torch.equal(worded.input_ids, default.input_ids)


def test_subtitles_of_a_protocol_stand_in_its_own_words(processor) -> None:
    protocol = load_protocol("video_mme/qwen3_vl_subtitles")
    settings = protocol.prompt_settings(PromptSettings(subtitles=False))
    builder = PromptBuilder(processor, settings, ones, wording=wording_of(protocol))
    assert builder.reads_subtitles
    assert (
        f"{VISION}This video's subtitles are listed below:\nHello.\nSelect" in builder.build(choice(), [video()]).text
    )
    silent = load_protocol("video_mme/official").prompt_settings(PromptSettings())
    assert not silent.subtitles
    assert silent.max_prompt_tokens == 32768


def test_an_answer_goes_on_from_its_beginning(processor) -> None:
    """The prompt with a beginning is the prompt without, and the beginning's tokens behind it."""
    protocol = load_protocol("mvbench/official")
    wording = wording_of(protocol)
    bare = PromptBuilder(processor, PromptSettings(), ones, wording=wording).build(choice(), [video()])
    builder = PromptBuilder(processor, PromptSettings(), ones, wording=wording, answer_prefix=protocol.answer_prefix)
    begun = builder.build(choice(), [video()])
    assert begun.text == f"{bare.text}Best option:("
    assert begun.text.endswith("Only give the best option.<|im_end|>\n<|im_start|>assistant\nBest option:(")
    beginning = processor.tokenizer("Best option:(")["input_ids"]
    assert begun.input_ids.tolist() == [*bare.input_ids.tolist(), *beginning]
    assert begun.pixel_values is not None
    assert begun.content_key == bare.content_key


def test_an_answer_that_begins_with_thinking_cannot_begin_otherwise(processor) -> None:
    thinking = copy.copy(processor)
    thinking.chat_template = processor.chat_template.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    assert PromptBuilder(thinking, PromptSettings(), ones).build(choice(), [video()]).text.endswith("<think>\n")
    with pytest.raises(ModelError, match=r"begins it with <think>.*Choose a protocol without answer_prefix"):
        PromptBuilder(thinking, PromptSettings(), ones, answer_prefix="So:").build(choice(), [video()])


@pytest.mark.parametrize("texts", [("<|im_end|>", "Who?"), ("", "Who? <|video_pad|>")], ids=["system", "user"])
def test_control_tokens_are_refused_in_a_wordings_texts(processor, texts: tuple[str, str]) -> None:
    builder = PromptBuilder(processor, PromptSettings(), ones, wording=lambda sample, media: texts)
    with pytest.raises(SampleError, match="control token"):
        builder.build(choice(), [video()])


def test_frames_stand_as_images_between_the_words(processor) -> None:
    """The same prompt as of a sample whose media are those pictures, but for the places of its words."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 3, 56, 56), dtype=np.uint8)
    clip = replace(video(), frames=noise)

    def wording(sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, Turn]:
        return "", Turn((2, "Hello.\n", 0, 3, "Who?"))

    prompt = PromptBuilder(processor, PromptSettings(), ones, wording=wording).build(choice(), [clip])
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\n{image}Hello.\n{image}{image}Who?<|im_end|>" in prompt.text
    assert prompt.media_kinds == ("image",) * 3 and prompt.num_visual_tokens == 3 * 4
    pictures = [DecodedMedia("image", noise[place][None], (0.0,), 0.0, "pyav") for place in (2, 0, 3)]
    asked = replace(choice(), media=(MediaRef("image", "a.png"),) * 3)
    same = PromptBuilder(processor, PromptSettings(), ones).build(asked, pictures)
    assert prompt.pixel_values is not None and same.pixel_values is not None and prompt.grid_thw is not None
    assert torch.equal(prompt.pixel_values, same.pixel_values) and prompt.grid_thw.tolist() == [[1, 4, 4]] * 3
    assert prompt.media_keys == same.media_keys


def test_a_token_in_a_text_between_frames_is_refused(processor) -> None:
    def wording(sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, Turn]:
        return "", Turn((0, "<|image_pad|>\n", 1, "Who?"))

    with pytest.raises(SampleError, match=r"control token '<\|image_pad\|>'"):
        PromptBuilder(processor, PromptSettings(), ones, wording=wording).build(choice(), [video()])
