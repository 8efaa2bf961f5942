"""Which frame is which, as they come out of a decoder: by their times, or by their order where times do not tell.

Frames come in the order they are shown, whatever a container says about their times. Where several have one time, and
where packets carry times of storage in place of times of presentation, only that order names them: the tenth to come
out is the tenth. A frame that a decoder leaves out would shift all behind it, so their times, taken together, must be
those of the index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vlm_pg.media.boundary import DecodeFailure

# Decoders hold back up to 16 frames to put them in order (H.264 A.3.1, H.265 A.4.2); a group of so many and the next
MOST_HELD = 32

Keep = Callable[[int, Any], None]


def keep_by_time(frames: Iterable[Any], pts: Sequence[int], start: int, wanted: Sequence[int], keep: Keep) -> bool:
    """Hand the wanted frames to ``keep``, each known by its time.

    Args:
        frames: as they come out of the decoder, from time ``start`` on.
        pts: the index's.
        start: the first time that is expected.
        wanted: places in ``pts``, ascending, each of a time of its own.
        keep: takes a place and its frame.

    Returns:
        False as soon as one of them cannot come any more.

    Raises:
        DecodeFailure: a frame comes behind one that is shown later. Where frames were missing on the way, that is
            looked for behind the wanted ones too.
    """
    left = list(wanted)
    expected, latest, has_gap, beyond = bisect_left(pts, start), start, False, 0
    for frame in frames:
        if frame.pts < latest:
            raise DecodeFailure("decode", f"frames come in another order than their times, as at {frame.time:.3f} s")
        latest = frame.pts
        has_gap |= bisect_left(pts, latest) > expected
        expected = max(expected, bisect_left(pts, latest)) + 1  # the second of two of one time is still to come
        if left and latest > pts[left[0]]:
            return False
        if left and latest == pts[left[0]]:
            keep(left.pop(0), frame)
        if not left:
            if not has_gap or beyond == MOST_HELD:
                return True
            beyond += 1
    return not left


def keep_by_order(frames: Iterable[Any], pts: Sequence[int], first: int, wanted: Sequence[int], keep: Keep) -> bool:
    """As ``keep_by_time``, each frame known by how many have come before it.

    The frames up to a place are all there when their times are those of the index up to that place. That counts for
    the places before it: decoding may have begun with a picture behind which some are stored that are shown before it
    and are left out, which shows by the place next to it.

    Args:
        first: the place of the first frame.
        frames, pts, wanted, keep: as in ``keep_by_time``; ``wanted`` may be of one time.
    """
    chosen, last, latest = set(wanted), len(pts) - 1, None
    for place, frame in enumerate(frames, first):
        if place > min(last, wanted[-1] + MOST_HELD):
            return False
        latest = frame.pts if latest is None else max(latest, frame.pts)
        if place in chosen:
            keep(place, frame)
        if latest == pts[place] and (place == last or (pts[place + 1] > latest and place > wanted[-1])):
            return True
    return False
