"""Which frames, at which size, within which limits and token budget: functions on numbers.

The rules are qwen-vl-utils' own (``smart_nframes``, ``calculate_video_frame_range``, ``smart_resize`` and the pixel
budget of ``fetch_video``), so that a model sees here what it saw when it was pretrained. They run in the main process
(``parent.py``): a worker would import torchvision for them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from types import ModuleType

from vlm_pg.errors import SampleError
from vlm_pg.media.settings import MediaSettings

FRAME_MULTIPLE = 2
MAX_ASPECT_RATIO = 200
# qwen-vl-utils' pixel budget of a video, counted in merged patches ("tokens") of factor x factor pixels
FRAME_MAX_TOKENS = 768
VIDEO_TOTAL_TOKENS = 128_000 * 0.9
# how far the container's stated rate may lie from the timestamps before the timestamps are believed instead
RATE_TOLERANCE = 0.02


@cache
def _reference() -> ModuleType:
    """qwen-vl-utils: imported with the first medium, not before."""
    from qwen_vl_utils import vision_process

    vision_process.logger.setLevel(logging.ERROR)  # it would warn of every short video
    return vision_process


def average_fps(pts_seconds: Sequence[float], stated_fps: float) -> float:
    """Frames per second of a stored video.

    The container's own figure is taken when the timestamps agree with it: it is an exact fraction, while timestamps
    are rounded (Matroska: to milliseconds) and the frame count below rounds down, so 29.999 instead of 30 would lose
    two frames. Where they disagree, e.g. with a variable rate, the timestamps count.

    Args:
        pts_seconds: presentation times in ascending order, at least two.
        stated_fps: the container's average rate; 0 when it states none.
    """
    span_seconds = pts_seconds[-1] - pts_seconds[0]
    if span_seconds <= 0:
        raise SampleError(
            "corrupt_media",
            f"all {len(pts_seconds)} frames of the video carry the same timestamp ({pts_seconds[0]} s). Frame times "
            "must increase. Re-encode the file, or remove the sample.",
        )
    measured_fps = (len(pts_seconds) - 1) / span_seconds
    if stated_fps > 0 and abs(stated_fps - measured_fps) <= RATE_TOLERANCE * measured_fps:
        return stated_fps
    return measured_fps


def num_sampled_frames(total: int, video_fps: float, fps: float, min_frames: int, max_frames: int) -> int:
    """How many of ``total`` stored frames are read: even, and never more than there are.

    Raises:
        SampleError: ``too_few_frames`` for a video of fewer than two frames.
    """
    if total < FRAME_MULTIPLE:
        raise SampleError(
            "too_few_frames",
            f"the video has {total} frame(s). At least {FRAME_MULTIPLE} are needed. Use the file as an image, or "
            "remove the sample.",
        )
    wanted = {"fps": fps, "min_frames": min_frames, "max_frames": max_frames}
    return int(_reference().smart_nframes(wanted, total, video_fps))


def num_uniform_frames(total: int, num_frames: int) -> int:
    """``num_frames`` (even), where there are so many.

    Raises:
        SampleError: ``too_few_frames``.
    """
    if total < num_frames:
        raise SampleError(
            "too_few_frames",
            f"the video or its clip has {total} frame(s). media.num_frames={num_frames} are to be shown of each. Lower "
            f"media.num_frames, set media.frames=fps (with min_frames and max_frames {num_frames} a shorter video is "
            "shown with as many as it has), or remove the sample.",
        )
    return int(_reference().smart_nframes({"nframes": num_frames}, total, 1.0))


def clip_range(total: int, video_fps: float, start: float | None, end: float | None) -> tuple[int, int] | None:
    """First and last of ``total`` frames of a constant rate that a clip holds, times in seconds.

    None where qwen-vl-utils takes the clip for none: it holds fewer than two frames.
    """
    clip = {"video_start": start, "video_end": end}
    try:
        first, last, _ = _reference().calculate_video_frame_range(clip, total, video_fps)
    except ValueError:
        return None
    return int(first), int(last)


def frame_indices(total: int, count: int, first: int = 0) -> list[int]:
    """``count`` indices spread evenly over ``total`` ones from ``first`` on, both ends included, ascending.

    ``frame_indices(10, 4) == [0, 3, 6, 9]``. Computed by ``torch.linspace`` in float32 like the reference, whose
    rounding of halves would be hard to imitate otherwise.
    """
    import torch

    return torch.linspace(first, first + total - 1, count).round().long().tolist()


def sampled_fps(count: int, total: int, video_fps: float) -> float:
    """Rate of the sampled frames: ``count`` of ``total`` frames of a video of ``video_fps``."""
    return count / total * video_fps


def video_max_pixels(count: int, min_pixels: int, max_pixels: int, factor: int) -> float:
    """The largest area of one frame: ``max_pixels``, lowered when many frames share the budget of the whole video."""
    area = factor * factor
    share = VIDEO_TOTAL_TOKENS * area / count * FRAME_MULTIPLE
    return min(max_pixels, max(min(FRAME_MAX_TOKENS * area, share), int(min_pixels * 1.05)))


def check_aspect_ratio(height: int, width: int) -> None:
    """Raise SampleError ``bad_aspect_ratio`` for an empty picture or one more than 200 times as long as wide."""
    ratio = max(height, width) / max(min(height, width), 1)
    if min(height, width) < 1 or ratio > MAX_ASPECT_RATIO:
        raise SampleError(
            "bad_aspect_ratio",
            f"the picture is {width}x{height} (aspect ratio {ratio:.0f}). Ratios up to {MAX_ASPECT_RATIO} are allowed. "
            "Crop the file, or remove the sample.",
        )


def resized_size(height: int, width: int, min_pixels: float, max_pixels: float, factor: int = 28) -> tuple[int, int]:
    """Height and width as multiples of ``factor``, area within the bounds, aspect kept as well as possible.

    Raises:
        SampleError: ``bad_aspect_ratio`` above 200, ``too_narrow`` when a side would shrink to nothing.
    """
    check_aspect_ratio(height, width)
    new_height, new_width = _reference().smart_resize(height, width, factor, min_pixels, max_pixels)
    if new_height == 0 or new_width == 0:
        raise SampleError(
            "too_narrow",
            f"the picture is {width}x{height}; scaled down to {max_pixels:.0f} pixels, a side would be shorter than "
            f"{factor} pixels. At least {factor} are needed. Raise max_pixels, crop the file, or remove the sample.",
        )
    return new_height, new_width


def visual_tokens(count: int, height: int, width: int, factor: int) -> int:
    """Tokens of ``count`` frames after the merger: two frames of ``factor`` x ``factor`` pixels make one."""
    return count // FRAME_MULTIPLE * (height // factor) * (width // factor)


def frames_within(
    count: int, least: int, stored: tuple[int, int], bounds: tuple[int, int], factor: int, budget: int | None = None
) -> tuple[int, int, int]:
    """Number, height and width of the frames of one video.

    First the area of a frame is lowered, down to the least one; only then are frames taken away.

    Args:
        count, least: how many frames are wanted (even), and how few they may become.
        stored: height and width of the stored frames, upright.
        bounds: least and largest area of a frame, in pixels.
        factor: sides become its multiples.
        budget: most visual tokens of the video, by ``visual_tokens``; None for no limit.

    Raises:
        SampleError: ``bad_aspect_ratio``, ``too_narrow``, or ``too_many_visual_tokens`` where the fewest frames of the
            least area are above the budget.
    """
    size = _size(count, stored, bounds, factor)
    if budget is None:
        return count, *size
    for frames in range(count, least - 1, -FRAME_MULTIPLE):
        share = budget // (frames // FRAME_MULTIPLE) * factor**2
        for limit in (None, max(share, bounds[0])):
            try:
                size = _size(frames, stored, bounds, factor, limit)
            except SampleError:  # it would become too narrow, and fewer frames may be larger
                continue
            if visual_tokens(frames, *size, factor) <= budget:
                return frames, *size
    raise SampleError(
        "too_many_visual_tokens",
        f"{least} frames of {stored[1]}x{stored[0]} pixels, the fewest that may be shown of this video, take more than "
        f"{budget} visual tokens, even scaled to {bounds[0]} pixels each. At most media.video_tokens are allowed. "
        "Raise it, lower media.min_pixels, or show fewer frames (media.min_frames, or the record's times).",
    )


def _size(
    count: int, stored: tuple[int, int], bounds: tuple[int, int], factor: int, limit: int | None = None
) -> tuple[int, int]:
    largest = video_max_pixels(count, *bounds, factor)
    return resized_size(*stored, bounds[0], largest if limit is None else min(largest, limit), factor)


def check_frame_size(name: str, width: int, height: int, settings: MediaSettings) -> None:
    """Refuse by what is stated of a frame's size; 0 stands for "not stated".

    Raises:
        SampleError: ``video_too_large``, ``bad_aspect_ratio``.
    """
    if width * height > settings.max_video_frame_pixels:
        raise too_large(name, f"it has frames of {width}x{height} pixels", settings)
    if width and height:
        check_aspect_ratio(height, width)


def check_length(name: str, seconds: float, settings: MediaSettings) -> None:
    """Raises SampleError ``video_too_long``."""
    if seconds > settings.max_video_seconds:
        raise SampleError(
            "video_too_long",
            f"video '{name}' lasts {seconds:.0f} s. At most {settings.max_video_seconds:.0f} s are allowed. Cut "
            "the file, or raise media.max_video_seconds.",
        )


def too_large(name: str, cause: str, settings: MediaSettings) -> SampleError:
    """``video_too_large``."""
    return SampleError(
        "video_too_large",
        f"video '{name}' is too large: {cause}. At most {settings.max_video_frame_pixels} pixels are allowed. Scale "
        "the file down, or raise media.max_video_frame_pixels.",
    )
