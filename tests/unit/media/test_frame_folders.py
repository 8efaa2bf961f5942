"""A folder of numbered pictures is shown as the video of the same frames is, or refused: no frame is guessed.

The oracle is the same pictures in a video file, which FFmpeg reads by another index: frames, times and, where the
codec keeps them, pixels are equal.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.clips import number_of
from tests.support.frame_folders import coloured, write_folder, write_video
from tests.support.hostile_files import huge_webp
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_file, probe_file
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.paths import resolve
from vlm_pg.media.sampling import Part
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaRef

PARTS = {
    "whole": {},
    "clip": {"start": 1.0, "end": 4.0},
    "clip between pictures": {"start": 0.4, "end": 3.2},
    "clip to the end": {"start": 4.0},
    "clip beyond the end": {"start": 2.0, "end": 99.0},
    "moments": {"times": (0.0, 0.3, 0.34, 1.0, 2.99, 5.6)},
}
SETTINGS = {
    "two a second": {"fps": 2.0},
    "few": {"fps": 1.0, "max_frames": 6},
    "all": {"fps": 30.0, "max_frames": 100},
    "evenly": {"frames": "uniform", "num_frames": 4},
    "few tokens": {"video_tokens": 12},
}


def shown(path: Path, part: dict = {}, rate: float | None = None, **settings) -> DecodedMedia:  # noqa: B006
    return decode_file("video", str(path), MediaSettings(**settings), 28, Part(**part, folder_fps=rate))


def numbers(media: DecodedMedia) -> list[int | None]:
    return [number_of(frame.transpose(1, 2, 0)) for frame in media.frames]


def refusal(path: Path, rate: float = 3.0, part: dict = {}, **settings) -> SampleError:  # noqa: B006
    with pytest.raises(SampleError) as got:
        shown(path, part, rate, **settings)
    return got.value


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """17 pictures, three a second, as a folder and as a file."""
    folder, pictures = tmp_path_factory.mktemp("both"), [coloured(number) for number in range(17)]
    video = write_video(folder / "a.mov", pictures, Fraction(3), "png", "rgb24")
    return write_folder(folder / "a", pictures), video


PAIRS = [
    pytest.param(part, name, marks=() if number % len(SETTINGS) == index else pytest.mark.matrix)
    for index, name in enumerate(SETTINGS)
    for number, part in enumerate(PARTS)
]


@pytest.mark.parametrize(("part", "name"), PAIRS)
def test_the_same_frames_as_of_the_video(written: tuple[Path, Path], part: str, name: str) -> None:
    """Each part with one of the settings, under the marker ``matrix`` with all."""
    rates = zip(written, (3.0, None), strict=True)
    folder, video = (shown(path, PARTS[part], rate, **SETTINGS[name]) for path, rate in rates)
    assert np.array_equal(folder.frames, video.frames)
    assert folder.frame_seconds == pytest.approx(video.frame_seconds, abs=1e-12)
    assert folder.sampled_fps == pytest.approx(video.sampled_fps)
    assert (folder.decoder, video.decoder) == ("pillow", "pyav")


def test_the_same_frames_as_of_h264(tmp_path: Path) -> None:
    fps, pictures = Fraction(30000, 1001), [coloured(number) for number in range(30)]
    video = write_video(tmp_path / "a.mp4", pictures, fps, "libx264", "yuv420p")
    folder = write_folder(tmp_path / "a", pictures, "img_{}.jpg", first=0)
    for part in ({}, {"start": float(7 / fps), "end": float(19 / fps)}, {"times": (0.0, float(8.5 / fps))}):
        left, right = shown(video, part), shown(folder, part, float(fps))
        assert numbers(left) == numbers(right) and None not in numbers(left)
        assert left.frame_seconds == pytest.approx(right.frame_seconds, abs=0.0005)


def test_a_picture_is_shown_from_its_time_on(written: tuple[Path, Path]) -> None:
    """At three a second: 0.3 s is before the second one, 0.34 s is not; 2.99 s is a hundredth before the tenth."""
    media = shown(written[0], {"times": (0.0, 0.3, 0.34, 1.0, 2.99, 3.0)}, 3.0)
    assert numbers(media) == [0, 0, 1, 3, 8, 9]
    assert media.frame_seconds == pytest.approx((0.0, 0.0, 1 / 3, 1.0, 8 / 3, 3.0))
    assert refusal(written[0], part={"times": (5.7,)}).reason == "bad_clip"  # 17 / 3 s is 5.67 s


def test_numbers_decide_and_not_how_they_are_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [coloured(number) for number in range(12)], "frame-{}.jpeg")
    for other in ("n_frames", ".00003.jpg.swp", "audio.wav"):
        (folder / other).write_text("12")
    (folder / "flow").mkdir()
    assert numbers(shown(folder, {}, 1.0, fps=5.0, max_frames=100)) == list(range(12))


def remove(folder: Path, *given: int) -> None:
    for number in given:
        (folder / f"{number:05}.png").unlink()


def copy(folder: Path, name: str) -> None:
    shutil.copy(folder / "00003.png", folder / name)


def replaced(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        remove(folder, 5)
        make(folder / "00005.png")

    return change


FAULTS = {
    "a gap": (lambda folder: remove(folder, 4, 6, 7, 8), "lacks the pictures of number 4, 6 to 8, between 1 and 12"),
    "no beginning": (lambda folder: remove(folder, 1), "begins with number 2, as '00002.png' has it, and not with 0 "),
    "a number twice": (lambda folder: copy(folder, "3.jpg"), "two pictures of number 3, '00003.png' and '3.jpg'"),
    "two series": (lambda folder: copy(folder, "thumb_00001.png"), "pictures of 2 series ('...' and 'thumb_...')"),
    "no number": (lambda folder: copy(folder, "cover.png"), "a picture without a number, 'cover.png'"),
    "an unfinished one": (lambda folder: copy(folder, "00013.png.part"), "'00013.png.part' among its pictures"),
    "another form": (lambda folder: copy(folder, "00013.bmp"), "'00013.bmp' among its pictures"),
    "a link": (replaced(lambda path: path.symlink_to(path.with_name("00004.png"))), "'00005.png', which is a link"),
    "a pipe": (replaced(os.mkfifo), "'00005.png', which is no regular file"),
    "a folder": (replaced(os.mkdir), "'00005.png', which is no regular file"),
    "a huge number": (lambda folder: copy(folder, "9" * 200 + ".png"), "lacks the pictures of number 13 to 99999999"),
    "nothing": (lambda folder: remove(folder, *range(1, 13)), "holds no numbered picture"),
}


@pytest.mark.parametrize(("change", "words"), FAULTS.values(), ids=list(FAULTS))
def test_what_leaves_the_order_open_is_refused(tmp_path: Path, change, words: str) -> None:
    folder = write_folder(tmp_path / "a", [coloured(number) for number in range(12)])
    change(folder)
    fault = refusal(folder)
    assert fault.reason == "bad_frame_folder" and words in str(fault)
    assert "numbered without gaps from 0 or 1 on" in str(fault)


def turned(folder: Path, number: int) -> None:
    """Stored as the others, and to be shown upright: 64 wide and 96 high."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = folder / f"{number:05}.jpg"
    Image.open(path).save(path, exif=exif, quality=95)


def test_pictures_of_one_size_are_needed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [coloured(number) for number in range(12)], "{:05}.jpg")
    turned(folder, 1)
    fault = refusal(folder)
    assert fault.reason == "bad_frame_folder"
    assert "several sizes: '00001.jpg' has 64x96 pixels, '00003.jpg' 96x64" in str(fault)
    for number in range(2, 13):
        turned(folder, number)
    upright = shown(folder, {}, 3.0)
    assert upright.frames.shape[2] > upright.frames.shape[3]
    turned_back = [np.rot90(frame.transpose(1, 2, 0)) for frame in upright.frames]  # shown turned to the right
    assert [number_of(frame) for frame in turned_back] == [0, 2, 3, 5, 6, 8, 9, 11]  # 8 of 4 s, evenly from 0 to 11
    Image.new("RGB", (98, 64)).save(folder / "00002.jpg")
    fault = refusal(folder, part={"times": (0.0, 3.0)})  # number 2 is not shown, and its size is judged all the same
    assert "'00001.jpg' has 96x64 pixels, '00002.jpg' 98x64" in str(fault)


def test_limits_of_videos_and_of_images_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [coloured(number) for number in range(12)])
    assert refusal(folder, max_video_frames=11).reason == "video_too_long"
    assert "media.max_video_frames" in str(refusal(folder, max_video_frames=11))
    assert refusal(folder, max_video_seconds=3.9).reason == "video_too_long"  # 4 s
    assert refusal(folder, max_video_frame_pixels=96 * 64 - 1).reason == "video_too_large"
    assert refusal(folder, max_header_pixels=96 * 64 - 1).reason == "image_too_large"
    assert len(shown(folder, {}, 3.0, max_video_frames=12, max_video_seconds=4, max_video_frame_pixels=96 * 64).frames)
    one = write_folder(tmp_path / "b", [coloured(0)])
    assert refusal(one).reason == "too_few_frames"


def test_hostile_and_damaged_pictures_are_judged_as_images_are(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [coloured(number) for number in range(12)])
    (folder / "00007.png").write_bytes(huge_webp(16_000))
    assert refusal(folder).reason == "image_too_large"
    (folder / "00007.png").write_text("#EXTM3U\nfile:///etc/passwd\n")
    fault = refusal(folder)
    assert fault.reason == "corrupt_media" and "'a/00007.png' cannot be decoded" in str(fault)
    half = (folder / "00008.png").read_bytes()
    (folder / "00007.png").write_bytes(half[: len(half) // 2])
    fault = refusal(folder, part={"times": (0.0, 2.0)})
    assert fault.reason == "corrupt_media" and "'a/00007.png'" in str(fault)
    assert numbers(shown(folder, {"times": (0.0, 3.0)}, 3.0)) == [0, 9]  # of a file no damage elsewhere is seen either


def test_a_folder_is_one_only_where_the_record_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "root" / "a", [coloured(0)])
    write_folder(tmp_path / "outside", [coloured(0)])
    (tmp_path / "root" / "b.mp4").write_bytes(b"x")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    root = tmp_path / "root"
    assert resolve(MediaRef("video", "a", folder_fps=3.0), root) == str(root / "a")
    for ref, reason, words in (
        (MediaRef("video", "a"), "unsupported_media", "read where its record has 'folder_fps'"),
        (MediaRef("video", "b.mp4", folder_fps=3.0), "unsupported_media", "is no folder, and its record has"),
        (MediaRef("video", "https://host/a", folder_fps=3.0), "unsupported_media", "is a URL, and its record has"),
        (MediaRef("video", "../outside", folder_fps=3.0), "outside_root", "leaves the data root"),
        (MediaRef("video", "link", folder_fps=3.0), "outside_root", "leaves the data root"),
        (MediaRef("video", "c", folder_fps=3.0), "missing_media", "names no file"),
    ):
        with pytest.raises(SampleError) as got:
            resolve(ref, root, allow_remote=True)
        assert got.value.reason == reason and words in str(got.value)


@pytest.mark.usefixtures("kept_templates")
def test_a_worker_reads_it_and_a_probe_says_what_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", [coloured(number) for number in range(12)])
    ref = MediaRef("video", "a", 1.0, 3.0, folder_fps=3.0)
    with MediaLoader(MediaSettings(workers=1), tmp_path) as loader:
        (media,) = loader.load([ref])
        assert isinstance(media, DecodedMedia) and numbers(media) == [3, 5, 7, 9]
        for decode in (False, True):
            facts = loader.probe(ref, decode).result()  # type: ignore[union-attr]
            assert (facts.frames, facts.height, facts.width) == (4, *media.frames.shape[2:])
            assert (facts.frame_seconds, facts.sampled_fps) == (media.frame_seconds, media.sampled_fps)
            assert facts.seconds == 4.0


def test_content_is_that_of_the_pictures_in_their_order(tmp_path: Path) -> None:
    pictures = [coloured(number) for number in range(6)]

    def content(folder: Path, fps: float = 3.0) -> str:
        return probe_file("video", str(folder), MediaSettings(), 28, Part(folder_fps=fps)).content

    first = content(write_folder(tmp_path / "a", pictures))
    assert content(write_folder(tmp_path / "b", pictures, "x_{}.png", first=0), 8.0) == first
    assert content(write_folder(tmp_path / "c", [*pictures[:4], pictures[5], pictures[4]])) != first
    assert content(write_folder(tmp_path / "d", pictures[:5])) != first
