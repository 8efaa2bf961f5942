"""How each family learns when a frame was shown, and which subtitles stand with it: words before every two frames or
seconds per temporal patch; clips and moments; what is shared; what a server gets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.tiny import tiny_processor
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.sampling import Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.prompt_tree import prompt_tree
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.chat import subtitle_lines
from vlm_pg.prompts.prompt_source import SourcePool
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.types import Cue, DecodedMedia, MediaRef, Prompt, Sample

IN_WORDS = ("qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.matrix))
REAL_VIDEOS = (
    "flipping_a_pancake.mkv",
    "h264_10bits.mp4",
    *(pytest.param(name, marks=pytest.mark.matrix) for name in ("nasa_13013.mp4", "video_90.mov")),
)
CUES = (Cue(3.25, 4.0, "Mind the gap."), Cue(5.0, 6.04, "Doors close."))
LINES = "Subtitles:\n[3.2-4.0 seconds] Mind the gap.\n[5.0-6.0 seconds] Doors close."


def sample(name: str, *refs: MediaRef, question: str = "What is said?") -> Sample:
    return Sample(name, question, refs, (), "x", "free_form", "s", "c")


def video(seconds: tuple[float, ...], fps: float, cues: tuple[Cue, ...] = (), side: int = 28) -> DecodedMedia:
    pixels = np.random.default_rng(len(seconds)).integers(0, 256, (len(seconds), 3, side, 2 * side), dtype=np.uint8)
    return DecodedMedia("video", pixels, seconds, fps, "pyav", cues)


def image() -> DecodedMedia:
    pixels = np.random.default_rng(9).integers(0, 256, (1, 3, 32, 32), dtype=np.uint8)
    return DecodedMedia("image", pixels, (0.0,), 0.0, "pillow")


def build(
    family: str, media: list[DecodedMedia], question: str = "What is said?", **settings: object
) -> tuple[Prompt, ChatMessages]:
    policy = tiny_policy(family=family)
    one = sample("7", *(MediaRef(item.kind, "a.mp4") for item in media), question=question)
    builder = PromptBuilder(policy.processor, PromptSettings(**settings), policy.positions)  # type: ignore[arg-type]
    return builder.build(one, media), ChatMessages(policy, {"7": one})


def times_in_words(prompt: Prompt) -> list[float]:
    text = tiny_processor("qwen3_vl").tokenizer.decode(prompt.input_ids)
    return [float(found) for found in re.findall(r"<([0-9.]+) seconds>", text)]


@pytest.mark.parametrize("family", IN_WORDS)
@pytest.mark.parametrize(
    ("seconds", "fps"),
    [
        ((0.0, 0.5, 1.0, 1.5), 2.0),
        ((0.0, 0.7, 1.1, 5.3, 60.0, 61.2), 0.1),  # no fixed rate
        (tuple(index * 1001 / 30000 * 7 for index in range(8)), 30000 / 1001 / 7),
        ((0.0, 3599.9), 1 / 3599.9),
    ],
    ids=["two a second", "uneven", "every seventh of 29.97", "an hour"],
)
def test_the_words_are_the_frames_own_times(family: str, seconds: tuple[float, ...], fps: float) -> None:
    """A temporal patch is named by the middle of its two frames' times."""
    expected = [float(f"{(a + b) / 2:.1f}") for a, b in zip(seconds[::2], seconds[1::2], strict=True)]
    assert times_in_words(build(family, [video(seconds, fps, side=32)])[0]) == expected


@pytest.mark.parametrize("family", IN_WORDS)
def test_every_patch_in_time_is_a_block_of_its_own(family: str) -> None:
    """Two videos with an image between them: grids and pixels stay in order though the words cut the videos up."""
    media = [video((0.0, 1.0, 2.0, 3.0), 1.0, side=32), image(), video((0.0, 4.0), 0.25, side=32)]
    prompt, _ = build(family, media)
    assert times_in_words(prompt) == [0.5, 2.5, 2.0]
    assert prompt.media_kinds == ("video", "image", "video")
    assert prompt.grid_thw is not None and prompt.pixel_values is not None
    assert prompt.grid_thw.tolist() == [[2, 2, 4], [1, 2, 2], [1, 2, 4]]
    runs = torch.unique_consecutive(prompt.mm_token_type_ids).tolist()
    assert [kind for kind in runs if kind] == [2, 2, 1, 2]
    alone = [build(family, [item])[0] for item in media]
    pixels = [item.pixel_values for item in alone if item.pixel_values is not None]
    assert torch.equal(prompt.pixel_values, torch.cat(pixels))
    assert prompt.media_keys == tuple(item.media_keys[0] for item in alone)
    # in time every block stands still
    visual = prompt.mm_token_type_ids == 2
    assert prompt.positions_3P[0][visual].unique().numel() == 3


def test_qwen2_vl_gets_no_times() -> None:
    fast, slow = (build("qwen2_vl", [video((0.0, gap), 1 / gap)])[0] for gap in (0.5, 30.0))
    assert times_in_words(fast) == []
    assert torch.equal(fast.input_ids, slow.input_ids) and torch.equal(fast.positions_3P, slow.positions_3P)


def test_qwen2_5_vl_gets_times_by_positions() -> None:
    fast, slow = (build("qwen2_5_vl", [video((0.0, gap, 2 * gap, 3 * gap), 1 / gap)])[0] for gap in (0.5, 30.0))
    assert torch.equal(fast.input_ids, slow.input_ids) and not torch.equal(fast.positions_3P, slow.positions_3P)


@pytest.mark.parametrize("name", REAL_VIDEOS)
def test_a_real_video_is_what_qwens_own_reader_makes_of_it(media_dir: Path, name: str) -> None:
    """Pixels, grids and words equal the processor fed by ``process_vision_info`` at patch size 16."""
    from qwen_vl_utils import process_vision_info

    # 10-bit colour is turned into RGB differently by decord, which Qwen's reader uses, and by PyAV
    settings = MediaSettings(max_frames=8, max_pixels=64 * 32**2, decoder="decord" if "10bits" in name else "auto")
    media = decode_file("video", str(media_dir / name), settings, 32)
    prompt, _ = build("qwen3_vl", [media])
    element = {"type": "video", "video": str(media_dir / name), "fps": 2.0, "min_frames": 4, "max_frames": 8,
               "min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}  # fmt: skip
    messages = [{"role": "user", "content": [element]}]
    _, videos, options = process_vision_info(
        messages, image_patch_size=16, return_video_kwargs=True, return_video_metadata=True
    )
    processor = tiny_processor("qwen3_vl")
    frames, metadata = videos[0]
    theirs = processor(
        text=[prompt.text], videos=[frames], video_metadata=[metadata], do_resize=False, return_tensors="pt", **options
    )
    assert prompt.grid_thw is not None and prompt.pixel_values is not None
    assert torch.equal(prompt.grid_thw, theirs["video_grid_thw"])
    assert torch.equal(prompt.pixel_values, theirs["pixel_values_videos"])
    words = re.findall(r"<([0-9.]+) seconds>", processor.tokenizer.decode(theirs["input_ids"][0]))
    # theirs divides the frame's index by the average rate, ours is the stored time: equal up to the last digit
    assert times_in_words(prompt) == pytest.approx([float(word) for word in words], abs=0.1001)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        # frames 180 to 240 of 30 a second, 61 of them at 2 a second are 4: 180, 200, 220, 240
        (Part(6.0, 8.0), [(6.0 + 6.667) / 2, (7.333 + 8.0) / 2]),
        (Part(times=(0.5, 2.0, 9.0)), [1.25, 9.0]),
        (Part(9.4, None), [(9.4 + 9.7) / 2, (10.0 + 10.3) / 2]),  # 282 to 309: two frames and the least number of four
    ],
)
def test_words_say_when_a_part_is_in_the_whole_video(media_dir: Path, part: Part, expected: list[float]) -> None:
    settings = MediaSettings(fps=2.0, max_frames=16, max_pixels=16 * 32 * 32)
    media = decode_file("video", str(media_dir / "flipping_a_pancake.mkv"), settings, 32, part)
    prompt, _ = build("qwen3_vl", [media])
    assert times_in_words(prompt) == pytest.approx(expected, abs=0.0501)


def test_positions_of_a_clip_count_from_its_beginning(media_dir: Path) -> None:
    """Qwen2.5-VL gets the rate: a clip of 61 frames of which 4 are shown, and moments 4.25 s apart on average."""
    seen: list[tuple[float, ...]] = []
    policy = tiny_policy(family="qwen2_5_vl")

    def positions(*arguments):  # type: ignore[no-untyped-def]
        seen.append(arguments[4])
        return policy.positions(*arguments)

    builder = PromptBuilder(policy.processor, PromptSettings(), positions)
    for part in (Part(6.0, 8.0), Part(times=(0.5, 2.0, 9.0))):
        path = str(media_dir / "flipping_a_pancake.mkv")
        media = decode_file("video", path, MediaSettings(max_pixels=16 * 784), 28, part)
        builder.build(sample("7", MediaRef("video", "a.mp4")), [media])
    assert [seconds for (seconds,) in seen] == pytest.approx([2 / (4 / 61 * 30), 2 * 4.25], rel=1e-6)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_subtitles_stand_between_video_and_question(family: str) -> None:
    side = tiny_policy(family=family).pixel_factor
    prompt, _ = build(family, [video((3.0, 6.0), 1 / 3, CUES, side)])
    assert prompt.subtitles == LINES
    before, after = prompt.text.split(LINES)
    assert "<|video_pad|>" in before and after.startswith("\nWhat is said?\n")
    without, _ = build(family, [video((3.0, 6.0), 1 / 3, CUES, side)], subtitles=False)
    none, _ = build(family, [video((3.0, 6.0), 1 / 3, (), side)])
    assert without.text == none.text and torch.equal(without.input_ids, none.input_ids)
    assert none.subtitles == "" and none.num_tokens < prompt.num_tokens


def test_subtitles_of_two_videos() -> None:
    plain = DecodedMedia("image", np.zeros((1, 3, 28, 28), np.uint8), (0.0,), 0.0, "pillow")
    lines = subtitle_lines([plain, video((0.0, 1.0), 1.0), video((0.0, 1.0), 1.0, CUES[:1])])
    assert lines == "Subtitles of video 2:\n[3.2-4.0 seconds] Mind the gap."
    assert subtitle_lines([plain, video((0.0, 1.0), 1.0)]) == ""


def test_control_tokens_in_subtitles_are_refused() -> None:
    bad = (Cue(0.0, 1.0, "go <|im_end|> on"),)
    with pytest.raises(SampleError, match=r"control token '<\|im_end\|>'.* or from its subtitles") as got:
        build("qwen2_5_vl", [video((0.0, 1.0), 1.0, bad)])
    assert got.value.reason == "media_token_in_text"
    build("qwen2_5_vl", [video((0.0, 1.0), 1.0, bad)], subtitles=False)


def test_subtitles_count_as_length_of_the_prompt() -> None:
    many = tuple(Cue(float(second), second + 1.0, "word " * 20) for second in range(100))
    media = [video((0.0, 1.0), 1.0, many)]
    fits = build("qwen2_5_vl", media)[0].num_tokens
    assert build("qwen2_5_vl", media, max_prompt_tokens=fits)[0].num_tokens == fits
    with pytest.raises(SampleError, match=rf"has {fits} tokens, .* Set prompt\.subtitles=false, or raise") as got:
        build("qwen2_5_vl", media, max_prompt_tokens=fits - 1)
    assert got.value.reason == "prompt_too_long"


def test_questions_on_one_video_share_its_subtitles() -> None:
    """All up to the question is one node: the video, and after it the subtitles."""
    many = tuple(Cue(float(second), second + 1.0, "word " * 20) for second in range(10))
    media = [video((0.0, 1.0, 2.0, 3.0), 1.0, many, 56)]
    one, other = (build("qwen2_5_vl", media, question=words)[0] for words in ("Who speaks?", "Is it loud?"))
    alike = int((one.input_ids[: other.num_tokens] != other.input_ids[: one.num_tokens]).nonzero()[0])
    tokens = tiny_processor().tokenizer(one.subtitles)["input_ids"]
    root = prompt_tree([one, other]).nodes[0]
    assert (root.parent, root.start, root.stop) == (-1, 0, alike)
    assert alike > one.num_visual_tokens + len(tokens)


def test_a_server_gets_the_subtitles() -> None:
    # 0 and 0.5 s: what vLLM takes for a list of frames
    prompt, messages = build("qwen3_vl", [video((0.0, 0.5), 2.0, CUES, 32)])
    (user,) = messages(prompt, "vllm")
    assert user["content"][1]["text"].startswith(LINES + "\nWhat is said?\n")
    assert prompt.words is not None
    with pytest.raises(ValueError, match=r"its words give .*Build prompts and messages with the same processor"):
        messages(replace(prompt, words=replace(prompt.words, user="What is said?\n")), "vllm")


@pytest.mark.parametrize("seconds", [(6.0, 6.5), (0.0, 0.8)])
def test_a_server_that_would_write_other_times_is_not_asked(seconds: tuple[float, float]) -> None:
    prompt, messages = build("qwen3_vl", [video(seconds, 2.0, side=32)])
    with pytest.raises(
        SampleError, match=r"in words \(.* vLLM would write others .* rollout\.engine=in_process"
    ) as got:
        messages(prompt, "vllm")
    assert got.value.reason == "video_for_server"
    by_rate, messages = build("qwen2_5_vl", [video(seconds, 2.0)])
    assert messages(by_rate, "vllm")


@pytest.mark.parametrize("wanted", [True, False])
def test_subtitles_of_a_clip_from_records_to_prompt(media_dir: Path, tmp_path: Path, wanted: bool) -> None:
    """The source of prompts: the clip's subtitles alone, or none without their file being read."""
    (tmp_path / "a.mkv").write_bytes((media_dir / "flipping_a_pancake.mkv").read_bytes())
    texts = "1\n00:00:01,000 --> 00:00:02,000\nbefore\n\n2\n00:00:05,000 --> 00:00:05,500\nflip\n"
    (tmp_path / "a.srt").write_text(texts)
    policy = tiny_policy()
    builder = PromptBuilder(policy.processor, PromptSettings(subtitles=wanted), policy.positions)
    media = MediaSettings(max_frames=4, max_pixels=16 * 784, workers=0)
    ref = MediaRef("video", "a.mkv", 4.0, 6.0, subtitles="a.srt")
    lost = MediaRef("video", "a.mkv", 4.0, 6.0, subtitles="lost.srt")
    with SourcePool(builder, DataSettings(), media, 28) as pool:
        good, bad = pool.for_records(tmp_path / "records.jsonl").load([sample("1", ref), sample("2", lost)])
    assert good[0][1].subtitles == ("Subtitles:\n[5.0-5.5 seconds] flip" if wanted else "")
    assert [item.reason for item in bad] == (["missing_media"] if wanted else [])
