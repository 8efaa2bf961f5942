"""Files that begin amid a group of pictures, as recordings of broadcasts do: which frame comes first.

What is stored before the first entry point needs pictures that are gone, and is shown by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlm_pg.media.keyframes import Entry, Syntax, entry

# decoders of these show nothing before an intra picture
_BEGIN_AT_INTRA = ("hevc", "mpeg1video", "mpeg2video")
# That of H.264 has rules of its own, with recovery points that are reached picture by picture. So it is asked.
_ASKED = ("h264",)
MOST_PICTURES = 1024  # until it shows one


@dataclass
class LateStart:
    """Follows a stream's packets from the first one on.

    ``begins``: whether the stream begins with its first flagged entry point, all of what is stored before being lost.
    ``first``: the timestamp of the first frame that comes, of a decoder that had to be asked; None for no answer.
    """

    syntax: Syntax
    first: int | None = None
    begins: bool = False
    _seen: int = 0
    _is_open: bool = True

    def follow(self, packet: Any, coded: memoryview) -> None:
        """The next packet, ``coded`` its content."""
        if not self._is_open or not len(coded):
            return
        # whether or not it is flagged: flags may be missing
        is_entry = entry(bytes(coded), True, self.syntax) is not Entry.NONE
        if self.syntax.codec in _BEGIN_AT_INTRA:
            self.begins = is_entry and self._seen > 0 and packet.is_keyframe
            self._is_open = not is_entry
        elif self.syntax.codec in _ASKED and not (is_entry and not self._seen):
            self._is_open = not self._is_answered(packet) and self._seen < MOST_PICTURES
        else:
            self._is_open = False
        self._seen += 1

    def _is_answered(self, packet: Any) -> bool:
        import av

        try:
            frames = packet.decode()
        except av.FFmpegError:  # of a picture that nobody shows
            return False
        if frames and not frames[0].is_corrupt:
            self.first = frames[0].pts
        return bool(frames)
