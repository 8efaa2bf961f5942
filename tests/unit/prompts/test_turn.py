"""Words and media of the user's turn: media at the marks of the record or before all words, a wording's own words."""

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
from vlm_pg.eval.protocols.protocol import Protocol, load_protocol
from vlm_pg.eval.wording import wording_of
from vlm_pg.prompts.builder import PromptBuilder, Wording, settings_wording
from vlm_pg.prompts.chat import Medium, Turn, with_media
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import Cue, DecodedMedia, MediaKind, MediaRef, Prompt, Sample

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
PIC: MediaKind = "image"
VID: MediaKind = "video"
BARE = PromptSettings(instructions=dict.fromkeys(PromptSettings().instructions, ""))


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


def ones(input_ids, types, grid_thw, kinds, seconds):
    return torch.arange(len(input_ids)).expand(3, -1)


def medium(kind: MediaKind, seed: int = 0, cues: tuple[Cue, ...] = ()) -> DecodedMedia:
    frames = np.random.default_rng(seed).integers(0, 256, (2 if kind == "video" else 1, 3, 56, 56), dtype=np.uint8)
    return DecodedMedia(kind, frames, (0.0, 0.5)[: len(frames)], 2.0, "pyav", cues)


def question(text: str, *kinds: MediaKind, options: tuple[str, ...] = ()) -> Sample:
    media = tuple(MediaRef(kind, f"{at}.x") for at, kind in enumerate(kinds))
    return replace(choice(), question=text, media=media, options=options)


def build(processor, sample: Sample, wording: Wording | None = None) -> Prompt:
    media = [medium(ref.kind, seed) for seed, ref in enumerate(sample.media)]
    builder = PromptBuilder(processor, BARE, ones, wording=wording)
    return builder.build(sample, media)


def user_turn(text: str) -> str:
    return text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (question("Is <image> red?", PIC), f"Is {IMAGE} red?"),
        (question("Who?\n<image>", PIC), f"Who?\n{IMAGE}"),
        (question("Is <image>like<image>?", PIC, PIC), f"Is {IMAGE}like{IMAGE}?"),
        (question("<image>\nIs it like <image>?", PIC, PIC), f"{IMAGE}Is it like {IMAGE}?"),
        (question("Is <video> <image>?", PIC, VID), f"Is {VIDEO} {IMAGE}?"),
        (question("<image> <video>\nWho?", VID, PIC), f"{IMAGE}{VIDEO}Who?"),
        # media of a kind without marks come before all words, in the record's order
        (question("Is <image> in it?", PIC, VID), f"{VIDEO}Is {IMAGE} in it?"),
        (question("<image>\nWho?", VID, PIC), f"{VIDEO}{IMAGE}Who?"),
        (question("<video>\nIs <image> in it?", PIC, VID), f"{VIDEO}Is {IMAGE} in it?"),
        (
            question("<image>Which?", PIC, PIC, PIC, options=("A. <image>", "B. not <image>")),
            f"{IMAGE}Which?\nA. {IMAGE}\nB. not {IMAGE}",
        ),
    ],
)  # fmt: skip
def test_media_stand_at_their_marks(processor, sample: Sample, expected: str) -> None:
    prompt = build(processor, sample)
    assert user_turn(prompt.text) == expected
    assert "<image>" not in prompt.text and "\ud800" not in prompt.text
    shown = [kind for kind in prompt.text.split("|") if kind in ("image_pad", "video_pad")]
    assert [f"{kind}_pad" for kind in prompt.media_kinds] == shown
    assert prompt.words is not None and prompt.words.user == expected.replace(IMAGE, "").replace(VIDEO, "")


def test_the_nth_mark_is_the_nth_medium(processor) -> None:
    """Each medium's pixels stand at its mark, in whatever order kinds are mixed."""
    sample = question("A <video> B <image> C <image>", PIC, PIC, VID)
    marked = build(processor, sample)
    alone = [
        PromptBuilder(processor, BARE, ones).build(question("Who?", ref.kind), [medium(ref.kind, seed)]).media_keys[0]
        for seed, ref in enumerate(sample.media)
    ]
    assert len(set(alone)) == 3
    assert marked.media_kinds == ("video", "image", "image")
    assert marked.media_keys == (alone[2], alone[0], alone[1])


@pytest.mark.parametrize("text", ["<image>\nWho?", "<image>Who?", "\n<image> <image>\n\nWho?"])
def test_marks_in_front_change_nothing(processor, text: str) -> None:
    kinds: list[MediaKind] = ["image"] * text.count("<image>")
    marked, plain = build(processor, question(text, *kinds)), build(processor, question("Who?", *kinds))
    assert marked.text == plain.text and marked.words == plain.words
    assert torch.equal(marked.input_ids, plain.input_ids) and marked.media_keys == plain.media_keys


def test_prompts_of_the_same_media_in_another_order_have_their_own_pixels(processor) -> None:
    """Grids alone do not tell an image from a video of one temporal patch."""
    media = [medium("image", 0), medium("video", 1)]
    builder, other = PromptBuilder(processor, BARE, ones), PromptBuilder(processor, BARE, ones)
    builder.build(question("Is <image> in <video>?", PIC, VID), media)
    second = question("Is <video> of <image>?", PIC, VID)
    after, first = builder.build(second, media), other.build(second, media)
    assert after.media_kinds == ("video", "image") and after.media_keys == first.media_keys
    assert after.pixel_values is not None and first.pixel_values is not None
    assert torch.equal(after.pixel_values, first.pixel_values)


def test_only_the_record_has_marks(processor) -> None:
    """A subtitle or a template that says "<image>" says just that."""
    clip = medium("video", cues=(Cue(0.0, 1.0, "Use the <image> or <video> tag."),))
    builder = PromptBuilder(processor, BARE.model_copy(update={"subtitles": True}), ones)
    sample = question("What is said in <video>?", VID)
    assert user_turn(builder.build(sample, [clip]).text) == (
        f"Subtitles:\n[0.0-1.0 seconds] Use the <image> or <video> tag.\nWhat is said in {VIDEO}?"
    )
    own = protocol("Say <video>: {question}")
    assert user_turn(build(processor, sample, wording_of(own)).text) == f"Say <video>: What is said in {VIDEO}?"


def protocol(template: str, **settings) -> Protocol:
    return Protocol(name="own", source="a test", max_new_tokens=8, templates={"*": template}, **settings)


def test_protocols_place_media_too(processor) -> None:
    """In front of the question means before the words of the template, as without marks."""
    sample = question("<image>\nIs it <image>?", PIC, PIC, options=("A. <image>", "B. no"))
    sample = replace(sample, media=(*sample.media, MediaRef("image", "2.x")))
    wording = wording_of(protocol("Look: {question}\n{options}", option_style="(A) text"))
    assert user_turn(build(processor, sample, wording).text) == f"{IMAGE}Look: Is it {IMAGE}?\n(A) {IMAGE}\n(B) no"
    without = wording_of(protocol("Look: {question}", without=("<image>",)))
    assert user_turn(build(processor, sample, without).text) == f"{IMAGE * 3}Look: Is it ?"


def test_a_template_that_repeats_or_drops_some_marks_is_refused(processor) -> None:
    sample = question("Is it <image>?", PIC, PIC, options=("A. <image>", "B. no"))
    for template, marks in (("{question}", 1), ("{question}\n{question}\n{options}", 3)):
        with pytest.raises(SampleError, match=rf"the prompt has '<image>' {marks} time\(s\), .* names 2 image") as got:
            build(processor, sample, wording_of(protocol(template)))
        assert got.value.reason == "media_mark_without_medium"


def test_frames_between_subtitles_leave_no_place_for_a_mark(processor) -> None:
    wording = wording_of(load_protocol("longvideobench/interleaved"))
    plain = build(processor, replace(choice(), question="Who?"), wording)
    assert build(processor, replace(choice(), question="<video>\nWho?"), wording).text == plain.text
    with pytest.raises(SampleError, match="has '<video>' amid its text") as got:
        build(processor, replace(choice(), question="Who in <video>?"), wording)
    assert got.value.reason == "not_asked"


def test_samples_that_no_file_was_read_for_are_counted_too(processor) -> None:
    with pytest.raises(SampleError, match=r"the text has '<video>' 1 time\(s\), and the record names 0 video\(s\)"):
        build(processor, question("Is <video> red?", PIC))


def test_a_wording_without_a_processor_places_media() -> None:
    media: Sequence[DecodedMedia] = [medium("image"), medium("video")]
    _, turn = settings_wording(BARE)(question("Is <image> in it?", PIC, VID), media)
    assert turn == Turn((Medium("video", 1), "Is ", Medium("image", 0), " in it?"))
    assert isinstance(turn, Turn) and turn.media_at == (0, 3) and turn.kinds == ["video", "image"]
    assert with_media(question("Who?", PIC, VID), "Who?") == "Who?"


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
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{VIDEO}Who?\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.subtitles == ""


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


@pytest.mark.parametrize(
    "texts",
    [("<|im_end|>", "Who?"), ("", "Who? <|video_pad|>"), ("", Turn((0, "<|image_pad|>\n", 1, "Who?")))],
    ids=["system", "user", "between frames"],
)
def test_control_tokens_are_refused_in_a_wordings_texts(processor, texts: tuple[str, str | Turn]) -> None:
    builder = PromptBuilder(processor, PromptSettings(), ones, wording=lambda sample, media: texts)
    with pytest.raises(SampleError, match="control token"):
        builder.build(choice(), [video()])


def test_frames_stand_as_images_between_the_words(processor) -> None:
    """The same prompt as of a sample whose media are those pictures, but for the positions of its words."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 3, 56, 56), dtype=np.uint8)
    clip = replace(video(), frames=noise)

    def wording(sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, Turn]:
        return "", Turn((2, "Hello.\n", 0, 3, "Who?"))

    prompt = PromptBuilder(processor, PromptSettings(), ones, wording=wording).build(choice(), [clip])
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\n{image}Hello.\n{image}{image}Who?<|im_end|>" in prompt.text
    assert prompt.media_kinds == ("image",) * 3 and prompt.num_visual_tokens == 3 * 4
    pictures = [DecodedMedia("image", noise[index][None], (0.0,), 0.0, "pyav") for index in (2, 0, 3)]
    pictured = replace(choice(), media=(MediaRef("image", "a.png"),) * 3)
    same = PromptBuilder(processor, PromptSettings(), ones).build(pictured, pictures)
    assert prompt.pixel_values is not None and same.pixel_values is not None and prompt.grid_thw is not None
    assert torch.equal(prompt.pixel_values, same.pixel_values) and prompt.grid_thw.tolist() == [[1, 4, 4]] * 3
    assert prompt.media_keys == same.media_keys
