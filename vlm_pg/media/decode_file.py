"""One file to one ``DecodedMedia``, or to its facts without the frames: what a worker process runs.

Shape letters: F frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vlm_pg.errors import SampleError
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.container import VideoHeader, header_of, open_video
from vlm_pg.media.frame_folder import FolderDecoder, FrameFolder, content_of_frames, list_frames, survey_folder
from vlm_pg.media.images import decode_image, most_file_bytes
from vlm_pg.media.index import TooManyFrames, VideoIndex, index_of
from vlm_pg.media.paths import shown_url
from vlm_pg.media.remote import download
from vlm_pg.media.sampling import (
    WHOLE,
    Choice,
    Part,
    Timeline,
    check_frame_size,
    check_length,
    choose,
    frames_within,
    too_large,
    visual_tokens,
)
from vlm_pg.media.seeking import FrameTooLarge, PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.subtitles import cues_within, read_subtitles
from vlm_pg.media.video_decoders import Decoder, DecordDecoder, TorchCodecDecoder
from vlm_pg.media.worker import call_in_parent
from vlm_pg.types import Cue, DecodedMedia, MediaKind

# decoded frames are resized in runs, so that a long video in 4K does not fill the memory
RUN_BYTES = 256 << 20
# With media.last_frame=always: more than any rounding of a header, less than most frame intervals.
MOST_MISSING_SECONDS = 0.05
Frames = VideoIndex | FrameFolder


def decode_file(
    kind: MediaKind, path: str, settings: MediaSettings, factor: int, part: Part = WHOLE, subtitles: str = ""
) -> DecodedMedia:
    """Decode a local file, or download and decode a URL.

    Args:
        factor: sides of frames become its multiples.
        part: the shown part of a video.
        subtitles: path or URL of its subtitles, "" for none.

    Raises:
        SampleError: for anything that is wrong with the file, or its subtitles.
    """
    try:
        with opened_media(path, subtitles, settings) as (local, name, cues):
            if kind == "image":
                return decode_image(local, settings, factor, name)
            return decode_video(local, settings, factor, name, part, cues)
    except MemoryError as error:
        raise SampleError(
            "out_of_memory",
            f"{kind} '{shown_name(path)}' does not fit into memory while it is decoded (media.worker_memory_bytes is "
            f"{settings.worker_memory_bytes}). Files within the size limits should. Scale the file down, or raise "
            "media.worker_memory_bytes.",
        ) from error


def shown_name(path: str) -> str:
    """The name of a file or URL in messages."""
    return shown_url(path) if "://" in path else Path(path).name


@contextmanager
def opened_media(path: str, subtitles: str, settings: MediaSettings) -> Iterator[tuple[Path, str, tuple[Cue, ...]]]:
    """A local path of the file, downloaded if ``path`` is a URL; its name in messages; all of its subtitles.

    Raises:
        SampleError: as ``download`` and ``read_subtitles``.
    """
    cues = read_subtitles(subtitles, shown_name(subtitles), settings) if subtitles else ()
    if "://" not in path:
        yield Path(path), shown_name(path), cues
        return
    # A download has no name in any folder, so that nothing stays behind when this process is killed.
    with download(path, settings) as file:
        yield Path(f"/proc/self/fd/{file.fileno()}"), shown_name(path), cues


def decode_video(
    path: Path, settings: MediaSettings, factor: int, name: str = "", part: Part = WHOLE, cues: tuple[Cue, ...] = ()
) -> DecodedMedia:
    """Sample, decode, turn upright and resize a video; see ``decode_file``.

    ``name``: in messages. ``cues``: all of its subtitles, of which those of the part are kept.
    """
    name = name or path.name
    index, timeline, choice = survey_video(path, name, settings, part)
    frames, choice, decoder = read_frames(path, name, index, choice, settings, factor)
    return DecodedMedia(
        kind="video",
        frames=frames,
        # Some containers (MPEG-TS) start counting anywhere; viewers and Qwen's own reader count from the first frame.
        frame_seconds=tuple(timeline.seconds[index] for index in choice.indices),
        sampled_fps=choice.sampled_fps,
        decoder=decoder,
        subtitles=cues_within(cues, part, timeline),
    )


def survey_video(path: Path, name: str, settings: MediaSettings, part: Part) -> tuple[Frames, Timeline, Choice]:
    """The frames of a video, when they are shown, and which are chosen: all of its packets read, none decoded.

    Raises:
        SampleError: as ``decode_file``, for all that shows without decoding.
    """
    if part.folder_fps is not None:
        folder, timeline = survey_folder(path, name, settings, part.folder_fps)
        return folder, timeline, choose(timeline, part, settings, name)
    try:
        with open_video(path, settings.max_video_frame_pixels) as (container, stream):
            header = header_of(container, stream)  # limits are tested as soon as each part is read
            check_frame_size(name, header.width, header.height, settings)
            check_length(name, header.duration_seconds, settings)
            index = index_of(container, stream, settings.max_video_frames)
    except TooManyFrames as error:
        raise SampleError(
            "video_too_long",
            f"video '{name}' has more frames than {settings.max_video_frames}, the most that are allowed. Cut the "
            "file, or raise media.max_video_frames.",
        ) from error
    except DecodeFailure as error:
        raise _corrupt(name, error) from error
    pts_seconds = index.pts_seconds
    check_length(name, pts_seconds[-1] - pts_seconds[0], settings)
    _check_missing(name, header, index, settings)
    zero = index.reach[0] if header.start_seconds is None else header.start_seconds
    clock = zero, index.reach[1]
    timeline = Timeline.of(pts_seconds, index.time_base, header.stated_fps, index.shown_until, clock)
    return index, timeline, choose(timeline, part, settings, name)


def frames_to_read(
    path: Path, name: str, index: Frames, choice: Choice, settings: MediaSettings, factor: int
) -> tuple[int, int, int]:
    """Number, height and width of the frames that ``decode_file`` would return, raising as it; one is decoded."""
    with _decoding(path, name, index, settings) as decoder:
        return _within_budget(decoder.read(choice.indices[:1]), choice, settings, factor)


def read_frames(
    path: Path, name: str, index: Frames, choice: Choice, settings: MediaSettings, factor: int
) -> tuple[np.ndarray, Choice, str]:
    """The frames, uint8 [F, 3, height, width], those chosen within the token budget, and the decoder's name.

    Raises:
        SampleError: as ``decode_file``.
    """
    with _decoding(path, name, index, settings) as decoder:
        return *_read_resized(decoder, choice, settings, factor), decoder.name


@contextmanager
def _decoding(path: Path, name: str, index: Frames, settings: MediaSettings) -> Iterator[Decoder]:
    """The file's decoder, whose errors become SampleErrors. ``auto`` is the one that is exact or fails, on any file."""
    try:
        decoder: Decoder
        if isinstance(index, FrameFolder):
            decoder = FolderDecoder(index, settings)
        elif settings.decoder == "decord":
            decoder = DecordDecoder(path, index)
        elif settings.decoder == "torchcodec":
            decoder = TorchCodecDecoder(path, index, settings.decoder_device)
        else:
            decoder = PyAVDecoder(path, index, settings.max_video_frame_pixels)
        yield decoder
    except FrameTooLarge as error:
        raise too_large(name, str(error), settings) from error
    except DecodeFailure as error:
        raise _corrupt(name, error) from error


def _read_resized(decoder: Decoder, choice: Choice, settings: MediaSettings, factor: int) -> tuple[np.ndarray, Choice]:
    """The frames of a choice at the tower's size, uint8 [F, 3, height, width]; fewer where the token budget says so."""
    first = decoder.read(choice.indices[:1])
    count, height, width = _within_budget(first, choice, settings, factor)
    choice = choice.with_count(count)  # which leaves the first one where it is
    distinct = sorted(set(choice.indices))
    run = max(1, RUN_BYTES // first.nbytes)
    parts = [resize_frames(first, height, width)]
    for start in range(1, len(distinct), run):
        parts.append(resize_frames(decoder.read(distinct[start : start + run]), height, width))
    frames = np.concatenate(parts)
    if len(distinct) < count:  # several moments on one frame
        frames = frames[np.searchsorted(distinct, choice.indices)]
    return frames, choice


def _within_budget(first: np.ndarray, choice: Choice, settings: MediaSettings, factor: int) -> tuple[int, int, int]:
    """Number, height and width of the frames of a choice, by its first frame as it is stored."""
    count, stored = len(choice.indices), (first.shape[1], first.shape[2])
    least = count if choice.span is None else min(count, settings.fewest_frames)
    bounds = settings.min_pixels, settings.max_pixels
    return call_in_parent(frames_within, count, least, stored, bounds, factor, settings.video_tokens)


def _check_missing(name: str, header: VideoHeader, index: VideoIndex, settings: MediaSettings) -> None:
    """Refuse a file that was cut off; with last_frame=always also one without the last frame, however long it is."""
    stated_seconds, there_seconds = missing(header, index)
    shown_seconds = there_seconds - index.lost_seconds
    if stated_seconds - shown_seconds > settings.max_missing_share * stated_seconds:
        raise SampleError(
            "truncated_media",
            f"video '{name}' is cut off: its header states {stated_seconds:.1f} s, {shown_seconds:.1f} s are there. "
            f"At most a share of {settings.max_missing_share:g} may be missing. Fetch the file again, or raise "
            "media.max_missing_share.",
        )
    if settings.last_frame == "as_sampled":
        return
    first, last = index.pts_seconds[0], index.pts_seconds[-1]
    rounding = min((last - first) / max(1, len(index.pts) - 1) / 2, MOST_MISSING_SECONDS)  # less than half a frame
    if stated_seconds - there_seconds > rounding:
        raise SampleError(
            "truncated_media",
            f"video '{name}' lacks its last frame: its header states {stated_seconds:.3f} s, {there_seconds:.3f} s are "
            "there. With media.last_frame=always that frame must be shown. Fetch the file again, or set "
            "media.last_frame=as_sampled.",
        )


def _corrupt(name: str, cause: DecodeFailure) -> SampleError:
    return SampleError(
        "corrupt_media",
        f"video '{name}' cannot be decoded: {cause}. A complete file in a codec that the chosen decoder knows is "
        "needed. Fetch or re-encode the file, set media.decoder=auto, or remove the sample.",
        cause.trace,
    )


def missing(header: VideoHeader, index: VideoIndex) -> tuple[float, float]:
    """How many seconds the header states, and how many of them are there; equal where nothing is missing.

    The video is compared with what is stated of the video; where only the whole file's length is stated, all streams
    are, because sound may go on when the picture has ended. What states no length (MPEG-TS, MPEG-PS) counts as whole.
    """

    def there(stated_seconds: float, reach: tuple[float, float]) -> tuple[float, float]:
        start, end = reach
        # a length, or (Matroska) an end: then what lies before the first packet is no part of it
        length = stated_seconds - start if 0 < start < stated_seconds else stated_seconds
        return length, min(length, end - start)

    video, whole = there(header.video_seconds, index.video_reach), there(header.duration_seconds, index.reach)
    return min(video, whole, key=lambda pair: pair[1] / pair[0] if pair[0] > 0 else 1.0)


def resize_frames(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic with antialiasing, rounded back to uint8, exactly as torchvision's ``resize`` does on uint8 tensors.

    ``frames`` uint8 [F, H, W, 3] become uint8 [F, 3, height, width]. torchvision itself is not imported: it would
    double the start-up time of the workers.
    """
    resized = np.empty((len(frames), 3, height, width), dtype=np.uint8)
    for index, frame in enumerate(frames):  # one at a time: the float copy of all of them is four times their size
        pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if pixels.shape[2:] != (height, width):
            try:
                scaled = torch.nn.functional.interpolate(
                    pixels.float(), size=(height, width), mode="bicubic", align_corners=False, antialias=True
                )
            except RuntimeError as error:
                if "allocate memory" in str(error):  # torch has no type of its own for it on a CPU
                    raise MemoryError(str(error)) from error
                raise
            pixels = scaled.clamp(0, 255).round().to(torch.uint8)
        resized[index] = pixels[0].numpy()
    return resized


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
            frame_seconds, sampled_fps = tuple(timeline.seconds[index] for index in choice.indices), choice.sampled_fps
            cues = cues_within(cues, part, timeline)
        if part.folder_fps is None:
            with local.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            folder = list_frames(local, name, part.folder_fps, settings.max_video_frames)
            content = content_of_frames(folder, most_file_bytes(settings))
        # An image is shown as two equal frames, as the tower's temporal patches ask for.
        tokens = visual_tokens(max(2, frames), height, width, factor)
        return MediaFacts(content, seconds, frames, height, width, tokens, frame_seconds, sampled_fps, cues)
