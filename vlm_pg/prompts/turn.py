"""A user's turn in which single frames and texts follow one another, in place of a video and words behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_pg.types import DecodedMedia


@dataclass(frozen=True)
class Turn:
    """``parts``: texts, and places of frames among those that are shown of the sample's one video.

    Turn((0, "Mind the gap.\\n", 1, 2, "What is said?"))
    """

    parts: tuple[str | int, ...]

    @property
    def text(self) -> str:
        """The texts alone, one after the other."""
        return "".join(part for part in self.parts if isinstance(part, str))

    def content(self) -> list[dict[str, Any]]:
        """As chat templates take it: a frame is an image."""
        return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts]

    def images(self, media: Sequence[DecodedMedia]) -> list[DecodedMedia]:
        """The frames as images, in their order.

        Raises:
            ValueError: there is another medium beside the video, or none.
        """
        if [one.kind for one in media] != ["video"]:
            raise ValueError(f"frames of one video are shown in turn with texts, and there are {len(media)} media")
        (video,) = media
        return [
            DecodedMedia("image", video.frames[part : part + 1], (0.0,), 0.0, video.decoder)
            for part in self.parts
            if isinstance(part, int)
        ]
