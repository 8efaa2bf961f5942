"""Still images: limits before decoding, orientation, transparency, damage. Controls: frames moved, never lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.hostile_files import huge_png
from tests.support.refusals import refused
from vlm_pg.media.controls import repeat_frame, shuffle_frames
from vlm_pg.media.images import decode_image
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia


def decode(path: Path, **changes) -> DecodedMedia:
    return decode_image(path, MediaSettings(**changes), 28)


def picture(height: int = 90, width: int = 150, channels: int = 3) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [rows * 255 // height, columns * 255 // width, (rows + columns) % 256, np.full_like(rows, 255)]
    return Image.fromarray(np.stack(planes[:channels], -1).astype(np.uint8))


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_pixels_of_qwens_own_reader(tmp_path: Path, name: str):
    from qwen_vl_utils.vision_process import fetch_image

    picture().save(tmp_path / name)
    media = decode(tmp_path / name)
    theirs = fetch_image({"image": str(tmp_path / name), "min_pixels": 4 * 784, "max_pixels": 1280 * 784})
    assert np.array_equal(media.frames[0], np.asarray(theirs).transpose(2, 0, 1))
    assert (media.kind, media.frame_seconds, media.sampled_fps, media.decoder) == ("image", (0.0,), 0.0, "pillow")
    assert media.frames.shape[0] == 1 and media.frames.dtype == np.uint8


def test_images_have_bounds_of_their_own(tmp_path: Path):
    """Not those of video frames: small ones are scaled up, large ones down, and a side that would vanish is refused."""
    of_frames = {"min_pixels": 784, "max_pixels": 784}
    for name, height, width in (("small.png", 28, 28), ("large.png", 280, 280), ("narrow.png", 31, 639)):
        picture(height, width).save(tmp_path / name)
    assert decode(tmp_path / "small.png", image_min_pixels=16 * 784, **of_frames).frames.shape[2:] == (112, 112)
    assert decode(tmp_path / "large.png", image_max_pixels=4 * 784, **of_frames).frames.shape[2:] == (56, 56)
    with refused("too_narrow"):
        decode(tmp_path / "narrow.png", image_max_pixels=20 * 784)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int):
    """Stored turned with the tag that turns it back, the picture comes out like the upright one."""
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the Pillow transposition that undoes each orientation
    stored = picture() if orientation == 1 else picture().transpose(back[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    picture().save(tmp_path / "upright.png")
    assert np.array_equal(decode(tmp_path / "a.png").frames, decode(tmp_path / "upright.png").frames)


def test_transparency_becomes_white(tmp_path: Path):
    pixels = np.zeros((56, 56, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "rgba.png")
    Image.fromarray(pixels[..., [0, 3]]).save(tmp_path / "la.png")
    palette = Image.new("P", (56, 56), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.save(tmp_path / "p.png", transparency=0)
    for name in ("rgba.png", "la.png", "p.png"):
        assert (decode(tmp_path / name).frames == 255).all(), name


@pytest.mark.parametrize("name", ["a.webp", "a.png"])
def test_an_animation_is_no_image(tmp_path: Path, name: str):
    """One of its frames would be shown without a word. One frame alone, and a JPEG with a preview, are images."""
    frames = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in (0, 100, 200)]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=100)
    with refused("animated_image", r"is an animation of 3 frames\. Still .* Convert it to mp4"):
        decode(tmp_path / name)
    frames[0].save(tmp_path / name, save_all=True)
    frames[0].save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=frames[1:])
    assert decode(tmp_path / name).frames.shape == decode(tmp_path / "a.jpg").frames.shape


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path):
    Image.fromarray(np.full((56, 56), 0x8000, dtype=np.uint16)).save(tmp_path / "a.png")
    assert (decode(tmp_path / "a.png").frames == 0x80).all()


@pytest.mark.parametrize("side", [9_000, 40_000])
def test_a_huge_image_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int):
    (tmp_path / "a.png").write_bytes(huge_png(side))
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with refused("image_too_large", r"At most 64000000 pixels are allowed\. Scale .* media\.max_header_pixels"):
        decode(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_a_truncated_file(tmp_path: Path, name: str):
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    for share in (0.0, 0.01, 0.5, 0.95):
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        with refused("corrupt_media", r"cannot be decoded: .* A complete JPEG, PNG, WEBP file .* Fetch"):
            decode(tmp_path / name)


def test_a_file_of_another_format_is_not_even_opened(tmp_path: Path):
    picture().save(tmp_path / "a.gif")
    (tmp_path / "a.gif").rename(tmp_path / "a.png")
    with refused("corrupt_media", "its content is no image that Pillow knows"):
        decode(tmp_path / "a.png")


def video(frames: int) -> DecodedMedia:
    pixels = np.arange(frames, dtype=np.uint8)[:, None, None, None] * np.ones((1, 3, 2, 2), dtype=np.uint8)
    return DecodedMedia("video", pixels, tuple(index * 0.5 for index in range(frames)), 2.0, "pyav")


def order(media: DecodedMedia) -> list[int]:
    return media.frames[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("frames", [4, 6, 8, 16])
def test_shuffling_moves_whole_temporal_patches(frames: int):
    seen = set()
    for number in range(30):
        shuffled = shuffle_frames(video(frames), f"key{number}")
        pairs = [tuple(order(shuffled)[start : start + 2]) for start in range(0, frames, 2)]
        assert sorted(pairs) == [(start, start + 1) for start in range(0, frames, 2)]
        assert order(shuffled) != list(range(frames)), "never the true order"
        assert shuffled.frame_seconds == video(frames).frame_seconds
        seen.add(tuple(pairs))
    assert len(seen) == 1 if frames == 4 else len(seen) > 3
    assert order(shuffle_frames(video(frames), "a")) == order(shuffle_frames(video(frames), "a"))


def test_repeating_leaves_one_temporal_patch():
    seen = set()
    for number in range(30):
        repeated = order(repeat_frame(video(8), f"key{number}"))
        assert repeated == repeated[:2] * 4 and repeated[1] == repeated[0] + 1
        seen.add(repeated[0])
    assert seen == {0, 2, 4, 6}
    of_turns = [order(repeat_frame(video(8), "key", turn=turn, turns=4)) for turn in range(4)]
    assert sorted(of_turns) == [[2 * run, 2 * run + 1] * 4 for run in range(4)], "no moment is favoured"


def test_controls_leave_images_alone_and_refuse_what_cannot_be_shuffled():
    still = DecodedMedia("image", np.zeros((1, 3, 2, 2), dtype=np.uint8), (0.0,), 0.0, "pillow")
    assert shuffle_frames(still, "k") is still and repeat_frame(still, "k") is still
    with refused("too_few_frames", r"2 frames cannot be shuffled in runs of 2\. At least two .* Raise media"):
        shuffle_frames(video(2), "k")
