"""Media stand where the marks of the record are; without marks, or with marks in front, before all words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.asking import choice
from tests.support.tiny import tiny_processor
from vlm_pg.errors import SampleError
from vlm_pg.eval.protocols.load import load_protocol
from vlm_pg.eval.protocols.protocol import Protocol
from vlm_pg.eval.wording import wording_of
from vlm_pg.prompts.builder import PromptBuilder, Wording, settings_wording
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.prompts.turn import Medium, Turn, with_media
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


def asked(question: str, *kinds: MediaKind, options: tuple[str, ...] = ()) -> Sample:
    media = tuple(MediaRef(kind, f"{at}.x") for at, kind in enumerate(kinds))
    return replace(choice(), question=question, media=media, options=options)


def build(processor, sample: Sample, wording: Wording | None = None) -> Prompt:
    media = [medium(ref.kind, seed) for seed, ref in enumerate(sample.media)]
    builder = PromptBuilder(processor, BARE, ones, wording=wording)
    return builder.build(sample, media)


def user_turn(text: str) -> str:
    return text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (asked("Is <image> red?", PIC), f"Is {IMAGE} red?"),
        (asked("Who?\n<image>", PIC), f"Who?\n{IMAGE}"),
        (asked("Is <image>like<image>?", PIC, PIC), f"Is {IMAGE}like{IMAGE}?"),
        (asked("<image>\nIs it like <image>?", PIC, PIC), f"{IMAGE}Is it like {IMAGE}?"),
        (asked("Is <video> <image>?", PIC, VID), f"Is {VIDEO} {IMAGE}?"),
        (asked("<image> <video>\nWho?", VID, PIC), f"{IMAGE}{VIDEO}Who?"),
        # media of a kind without marks come before all words, in the record's order
        (asked("Is <image> in it?", PIC, VID), f"{VIDEO}Is {IMAGE} in it?"),
        (asked("<image>\nWho?", VID, PIC), f"{VIDEO}{IMAGE}Who?"),
        (asked("<video>\nIs <image> in it?", PIC, VID), f"{VIDEO}Is {IMAGE} in it?"),
        (
            asked("<image>Which?", PIC, PIC, PIC, options=("A. <image>", "B. not <image>")),
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
    sample = asked("A <video> B <image> C <image>", PIC, PIC, VID)
    marked = build(processor, sample)
    alone = [
        PromptBuilder(processor, BARE, ones).build(asked("Who?", ref.kind), [medium(ref.kind, seed)]).media_keys[0]
        for seed, ref in enumerate(sample.media)
    ]
    assert len(set(alone)) == 3
    assert marked.media_kinds == ("video", "image", "image")
    assert marked.media_keys == (alone[2], alone[0], alone[1])


@pytest.mark.parametrize(
    "question", ["<image>\nWho?", "<image>Who?", "\n<image> <image>\n\nWho?", "<image><image>Who?"]
)
def test_marks_in_front_change_nothing(processor, question: str) -> None:
    kinds: list[MediaKind] = ["image"] * question.count("<image>")
    marked, plain = build(processor, asked(question, *kinds)), build(processor, asked("Who?", *kinds))
    assert marked.text == plain.text and marked.words == plain.words
    assert torch.equal(marked.input_ids, plain.input_ids) and marked.media_keys == plain.media_keys


def test_prompts_of_the_same_media_in_another_order_have_their_own_pixels(processor) -> None:
    """Grids alone do not tell an image from a video of one temporal patch."""
    media = [medium("image", 0), medium("video", 1)]
    builder, other = PromptBuilder(processor, BARE, ones), PromptBuilder(processor, BARE, ones)
    builder.build(asked("Is <image> in <video>?", PIC, VID), media)
    second = asked("Is <video> of <image>?", PIC, VID)
    after, first = builder.build(second, media), other.build(second, media)
    assert after.media_kinds == ("video", "image") and after.media_keys == first.media_keys
    assert after.pixel_values is not None and first.pixel_values is not None
    assert torch.equal(after.pixel_values, first.pixel_values)


def test_only_the_record_has_marks(processor) -> None:
    """A subtitle or a template that says "<image>" says just that."""
    clip = medium("video", cues=(Cue(0.0, 1.0, "Use the <image> or <video> tag."),))
    builder = PromptBuilder(processor, BARE.model_copy(update={"subtitles": True}), ones)
    sample = asked("What is said in <video>?", VID)
    assert user_turn(builder.build(sample, [clip]).text) == (
        f"Subtitles:\n[0.0-1.0 seconds] Use the <image> or <video> tag.\nWhat is said in {VIDEO}?"
    )
    own = protocol("Say <video>: {question}")
    assert user_turn(build(processor, sample, wording_of(own)).text) == f"Say <video>: What is said in {VIDEO}?"


def protocol(template: str, **settings) -> Protocol:
    return Protocol(name="own", source="a test", max_new_tokens=8, templates={"*": template}, **settings)


def test_protocols_place_media_too(processor) -> None:
    """In front of the question means before the words of the template, as without marks."""
    sample = asked("<image>\nIs it <image>?", PIC, PIC, options=("A. <image>", "B. no"))
    sample = replace(sample, media=(*sample.media, MediaRef("image", "2.x")))
    wording = wording_of(protocol("Look: {question}\n{options}", option_style="(A) text"))
    assert user_turn(build(processor, sample, wording).text) == f"{IMAGE}Look: Is it {IMAGE}?\n(A) {IMAGE}\n(B) no"
    without = wording_of(protocol("Look: {question}", without=("<image>",)))
    assert user_turn(build(processor, sample, without).text) == f"{IMAGE * 3}Look: Is it ?"


def test_a_template_that_repeats_or_drops_some_marks_is_refused(processor) -> None:
    sample = asked("Is it <image>?", PIC, PIC, options=("A. <image>", "B. no"))
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
        build(processor, asked("Is <video> red?", PIC))


def test_a_wording_without_a_processor_places_media() -> None:
    media: Sequence[DecodedMedia] = [medium("image"), medium("video")]
    _, turn = settings_wording(BARE)(asked("Is <image> in it?", PIC, VID), media)
    assert turn == Turn((Medium("video", 1), "Is ", Medium("image", 0), " in it?"))
    assert isinstance(turn, Turn) and turn.media_at == (0, 3) and turn.kinds == ["video", "image"]
    assert with_media(asked("Who?", PIC, VID), "Who?") == "Who?"
