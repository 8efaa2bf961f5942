"""A user's turn in which media, or single frames of a video, stand between texts instead of before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vlm_pg.types import DecodedMedia, MediaKind


@dataclass(frozen=True)
class Medium:
    """One of the sample's media: Medium("image", 1) is the second of them, an image."""

    kind: MediaKind
    index: int


@dataclass(frozen=True)
class Turn:
    """``parts``: texts and media in order; a number is that frame of the sample's one video, shown as an image.

    Turn(("Is ", Medium("image", 0), " the same as ", Medium("image", 1), "?"))
    Turn((0, "Mind the gap.\\n", 1, 2, "What is said?"))
    """

    parts: tuple[str | int | Medium, ...]

    @property
    def text(self) -> str:
        """The texts alone, one after the other."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def kinds(self) -> list[MediaKind]:
        """Of what is shown, in order of appearance."""
        shown = [part for part in self.parts if not isinstance(part, str)]
        return [part.kind if isinstance(part, Medium) else "image" for part in shown]

    @property
    def media_at(self) -> tuple[int, ...]:
        """See ``PromptWords``."""
        ends = accumulate(len(part) if isinstance(part, str) else 0 for part in self.parts)
        return tuple(end for end, part in zip(ends, self.parts, strict=True) if not isinstance(part, str))

    def shown(self, media: Sequence[DecodedMedia]) -> Sequence[DecodedMedia]:
        """The media, or the frames among the parts as images in their order.

        Raises:
            ValueError: frames are to be shown, and there is another medium beside the video, or none.
        """
        frames = [part for part in self.parts if isinstance(part, int)]
        if not frames:
            return media
        if [one.kind for one in media] != ["video"]:
            raise ValueError(f"frames of one video are shown in turn with texts, and there are {len(media)} media")
        (video,) = media
        return [DecodedMedia("image", video.frames[at : at + 1], (0.0,), 0.0, video.decoder) for at in frames]
