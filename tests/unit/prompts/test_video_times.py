"""How each family learns when a frame was shown: words before every two frames, or seconds per temporal patch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.tiny import VL_FAMILY_NAMES, tiny_processor
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.settings import MediaSettings
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import DecodedMedia, MediaRef, Prompt, Sample

IN_WORDS = tuple(name for name in VL_FAMILY_NAMES if name.startswith("qwen3"))
FACTOR = 32


def build(family: str, media: list[DecodedMedia]) -> Prompt:
    policy = tiny_policy(family=family)
    refs = tuple(MediaRef(item.kind, f"{index}.x") for index, item in enumerate(media))
    sample = Sample("7", "What happens?", refs, (), "B", "free_form", "s", "c")
    return PromptBuilder(policy.processor, PromptSettings(), policy.positions).build(sample, media)


def video(seconds: tuple[float, ...], fps: float, seed: int = 0, factor: int = FACTOR) -> DecodedMedia:
    shape = (len(seconds), 3, 2 * factor, factor)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return DecodedMedia("video", pixels, seconds, fps, "pyav")


def image() -> DecodedMedia:
    pixels = np.random.default_rng(9).integers(0, 256, (1, 3, 32, 32), dtype=np.uint8)
    return DecodedMedia("image", pixels, (0.0,), 0.0, "pillow")


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
    assert times_in_words(build(family, [video(seconds, fps)])) == expected


@pytest.mark.parametrize("family", IN_WORDS)
def test_every_patch_in_time_is_a_block_of_its_own(family: str) -> None:
    """Two videos with an image between them: grids and pixels stay in order though the words cut the videos up."""
    media = [video((0.0, 1.0, 2.0, 3.0), 1.0), image(), video((0.0, 4.0), 0.25, seed=1)]
    prompt = build(family, media)
    assert times_in_words(prompt) == [0.5, 2.5, 2.0]
    assert prompt.media_kinds == ("video", "image", "video")
    assert prompt.grid_thw is not None and prompt.pixel_values is not None
    assert prompt.grid_thw.tolist() == [[2, 4, 2], [1, 2, 2], [1, 4, 2]]
    runs = torch.unique_consecutive(prompt.mm_token_type_ids).tolist()
    assert [kind for kind in runs if kind] == [2, 2, 1, 2]
    alone = [build(family, [item]) for item in media]
    pixels = [item.pixel_values for item in alone if item.pixel_values is not None]
    assert torch.equal(prompt.pixel_values, torch.cat(pixels))
    assert prompt.media_keys == tuple(item.media_keys[0] for item in alone)
    # in time every block stands still; the next word goes on after the larger side of a frame
    visual = prompt.mm_token_type_ids == 2
    assert prompt.positions_3P[0][visual].unique().numel() == 3


def test_qwen2_vl_is_told_no_times() -> None:
    fast, slow = (build("qwen2_vl", [video((0.0, gap), 1 / gap, factor=28)]) for gap in (0.5, 30.0))
    assert times_in_words(fast) == []
    assert torch.equal(fast.input_ids, slow.input_ids) and torch.equal(fast.positions_3P, slow.positions_3P)


def test_qwen2_5_vl_is_told_by_positions() -> None:
    fast, slow = (build("qwen2_5_vl", [video((0.0, gap, 2 * gap, 3 * gap), 1 / gap, factor=28)]) for gap in (0.5, 30.0))
    assert torch.equal(fast.input_ids, slow.input_ids) and not torch.equal(fast.positions_3P, slow.positions_3P)


@pytest.mark.parametrize("name", ["flipping_a_pancake.mkv", "nasa_13013.mp4", "h264_10bits.mp4", "video_90.mov"])
def test_a_real_video_is_what_qwens_own_reader_makes_of_it(media_dir: Path, name: str) -> None:
    """Pixels, grids and words equal the processor fed by ``process_vision_info`` at patch size 16."""
    from qwen_vl_utils import process_vision_info

    # 10-bit colour is turned into RGB differently by decord, which Qwen's reader uses, and by PyAV
    settings = MediaSettings(max_frames=8, max_pixels=64 * FACTOR**2, decoder="decord" if "10bits" in name else "auto")
    media = decode_file("video", str(media_dir / name), settings, FACTOR)
    prompt = build("qwen3_vl", [media])
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
    # theirs divides the frame's place by the average rate, ours is the stored time: equal up to the last digit
    assert times_in_words(prompt) == pytest.approx([float(word) for word in words], abs=0.1001)
