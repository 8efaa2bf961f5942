"""How many frames of which size a video may have, so that its visual tokens stay within a budget."""

from __future__ import annotations

from vlm_pg.errors import SampleError
from vlm_pg.media.sampling import FRAME_MULTIPLE, resized_size, video_max_pixels


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
