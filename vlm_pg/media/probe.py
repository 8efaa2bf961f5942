"""What a medium is, without keeping its frames: for checks of records before anything is trained on them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from vlm_pg.media.decode_file import frames_to_read, opened_media, read_frames, survey_video
from vlm_pg.media.frame_folder import content_of_frames, list_frames
from vlm_pg.media.images import decode_image, most_file_bytes
from vlm_pg.media.sampling import WHOLE, Part, visual_tokens
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.subtitles import cues_within
from vlm_pg.types import Cue, MediaKind


@dataclass(frozen=True)
class MediaFacts:
    """A medium under some settings.

    ``content``: SHA-256 of the file, or of all pictures of a folder in their order. ``seconds``: of the whole video; 0
    of an image. ``frames``, ``height``, ``width``: what the tower would be shown. ``visual_tokens``: what that takes
    after the merger; of an image too.
    ``frame_seconds``, ``sampled_fps``, ``subtitles``: as in ``DecodedMedia``.
    """

    content: str
    seconds: float
    frames: int
    height: int
    width: int
    visual_tokens: int
    frame_seconds: tuple[float, ...] = ()
    sampled_fps: float = 0.0
    subtitles: tuple[Cue, ...] = ()


def probe_file(
    kind: MediaKind,
    path: str,
    settings: MediaSettings,
    factor: int,
    part: Part = WHOLE,
    subtitles: str = "",
    decode: bool = False,
) -> MediaFacts:
    """Read through a file; of a video one frame is decoded, or with ``decode`` all that would be shown.

    The other arguments are those of ``decode_file``. An image is decoded in any case.

    Raises:
        SampleError: as ``decode_file``, as far as it shows.
    """
    with opened_media(path, subtitles, settings) as (local, name, cues):
        seconds = sampled_fps = 0.0
        frame_seconds: tuple[float, ...] = (0.0,)
        if kind == "image":
            frames, _, height, width = decode_image(local, settings, factor, name).frames.shape
        else:
            index, timeline, choice = survey_video(local, name, settings, part)
            seconds = timeline.end
            if decode:
                frames, _, height, width = read_frames(local, name, index, choice, settings, factor)[0].shape
            else:
                frames, height, width = frames_to_read(local, name, index, choice, settings, factor)
            choice = choice.with_count(frames)
            frame_seconds, sampled_fps = tuple(timeline.seconds[place] for place in choice.indices), choice.sampled_fps
            cues = cues_within(cues, part, timeline)
        content = _content(local, name, settings, part)
        # An image is shown as two equal frames, as the tower's temporal patches ask for.
        tokens = visual_tokens(max(2, frames), height, width, factor)
        return MediaFacts(content, seconds, frames, height, width, tokens, frame_seconds, sampled_fps, cues)


def _content(path: Path, name: str, settings: MediaSettings, part: Part) -> str:
    if part.folder_fps is not None:
        folder = list_frames(path, name, part.folder_fps, settings.max_video_frames)
        return content_of_frames(folder, most_file_bytes(settings))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
