"""One file to one ``DecodedMedia``: what a worker process runs.

Shape letters: F frames.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vlm_pg.errors import SampleError
from vlm_pg.media import sampling
from vlm_pg.media.container import DecodeFailure, VideoHeader, VideoIndex, read_header, read_index
from vlm_pg.media.decoders import Decoder, DecordDecoder, PyAVDecoder
from vlm_pg.media.images import decode_image
from vlm_pg.media.remote import download
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaKind

# decoded frames are resized in runs, so that a long video in 4K does not fill the memory
RUN_BYTES = 256 << 20


def decode_file(kind: MediaKind, path: str, settings: MediaSettings, factor: int) -> tuple[DecodedMedia, str]:
    """Decode a local file, or download and decode a URL.

    Returns:
        The media, and why decord was passed over ("" if it was not).

    Raises:
        SampleError: for anything that is wrong with the file.
    """
    try:
        if "://" in path:
            with tempfile.TemporaryDirectory(prefix="vlm_pg_media_") as folder:
                return _decode_local(kind, download(path, Path(folder), settings), settings, factor)
        return _decode_local(kind, Path(path), settings, factor)
    except MemoryError as error:
        raise SampleError(
            "out_of_memory",
            f"{kind} '{Path(path).name}' does not fit into memory while it is decoded. Files within the size limits "
            "should. Scale the file down, or lower media.workers.",
        ) from error


def _decode_local(kind: MediaKind, path: Path, settings: MediaSettings, factor: int) -> tuple[DecodedMedia, str]:
    if kind == "image":
        return decode_image(path, settings, factor), ""
    return decode_video(path, settings, factor)


def decode_video(path: Path, settings: MediaSettings, factor: int) -> tuple[DecodedMedia, str]:
    """Sample, decode, turn upright and resize a video; see ``decode_file``."""
    try:
        header = read_header(path)
        _check_header(path, header, settings)
        index = read_index(path)
    except DecodeFailure as error:
        raise _corrupt(path, str(error)) from error
    pts_seconds = index.pts_seconds
    total = len(pts_seconds)
    _check_length(path, total, pts_seconds[-1] - pts_seconds[0], settings)
    video_fps = sampling.average_fps(pts_seconds, header.stated_fps) if total > 1 else header.stated_fps or 1.0
    count = sampling.num_sampled_frames(total, video_fps, settings.fps, settings.min_frames, settings.max_frames)
    indices = sampling.frame_indices(total, count)
    frames, decoder, passed_over = _read_frames(path, header, index, indices, settings, factor)
    media = DecodedMedia(
        kind="video",
        frames=frames,
        # Some containers (MPEG-TS) start counting anywhere; viewers and Qwen's own reader count from the first frame.
        frame_seconds=tuple(pts_seconds[place] - pts_seconds[0] for place in indices),
        sampled_fps=sampling.sampled_fps(count, total, video_fps),
        decoder=decoder,
    )
    return media, passed_over


def _read_frames(
    path: Path, header: VideoHeader, index: VideoIndex, indices: list[int], settings: MediaSettings, factor: int
) -> tuple[np.ndarray, str, str]:
    """The frames, the decoder that read them, and why decord was passed over ("" if it was not)."""
    openers, passed_over = _openers(settings.decoder)
    causes: list[str] = []
    for opener in openers:
        try:
            decoder = opener(path, index)
            try:
                return _read_resized(decoder, indices, settings, factor), decoder.name, passed_over
            finally:
                decoder.close()
        except DecodeFailure as error:
            order = "" if index.key_places_agree else " with open groups of pictures"
            passed_over = f"cannot {error.stage} codec {header.codec}{order}"
            causes.append(str(error))
    raise _corrupt(path, "; ".join(dict.fromkeys(causes)))


def _openers(choice: str) -> tuple[list[Callable[[Path, VideoIndex], Decoder]], str]:
    """The decoders to try in turn, and why decord is not among them though it was wanted."""
    if choice == "pyav":
        return [PyAVDecoder], ""
    if choice == "decord":
        return [DecordDecoder], ""
    if importlib.util.find_spec("decord") is None:
        return [PyAVDecoder], "is not installed"
    return [DecordDecoder, PyAVDecoder], ""


def _read_resized(decoder: Decoder, indices: list[int], settings: MediaSettings, factor: int) -> np.ndarray:
    """The frames ``indices`` at the tower's size: uint8 [F, 3, height, width]."""
    max_pixels = sampling.video_max_pixels(len(indices), settings.min_pixels, settings.max_pixels, factor)
    first = decoder.read(indices[:1])
    height, width = sampling.resized_size(first.shape[1], first.shape[2], settings.min_pixels, max_pixels, factor)
    run = max(1, RUN_BYTES // first.nbytes)
    parts = [resize_frames(first, height, width)]
    for start in range(1, len(indices), run):
        parts.append(resize_frames(decoder.read(indices[start : start + run]), height, width))
    return np.concatenate(parts)


def resize_frames(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic with antialiasing, rounded back to uint8, exactly as torchvision's ``resize`` does on uint8 tensors.

    torchvision itself is not imported: it would double the start-up time of a worker.

    Args:
        frames: uint8 [F, H, W, 3].

    Returns:
        uint8 [F, 3, height, width].
    """
    resized = np.empty((len(frames), 3, height, width), dtype=np.uint8)
    for index, frame in enumerate(frames):  # one at a time: the float copy of all of them is four times their size
        pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if pixels.shape[2:] != (height, width):
            scaled = torch.nn.functional.interpolate(
                pixels.float(), size=(height, width), mode="bicubic", align_corners=False, antialias=True
            )
            pixels = scaled.clamp(0, 255).round().to(torch.uint8)
        resized[index] = pixels[0].numpy()
    return resized


def _check_header(path: Path, header: VideoHeader, settings: MediaSettings) -> None:
    """Refuse by what the header states, before anything is decoded."""
    if header.width * header.height > settings.max_video_frame_pixels:
        raise SampleError(
            "video_too_large",
            f"video '{path.name}' has frames of {header.width}x{header.height} pixels. At most "
            f"{settings.max_video_frame_pixels} pixels are allowed. Scale the file down, or raise "
            "media.max_video_frame_pixels.",
        )
    if header.width and header.height:
        sampling.check_aspect_ratio(header.height, header.width)
    _check_length(path, 0, header.duration_seconds, settings)


def _check_length(path: Path, total: int, seconds: float, settings: MediaSettings) -> None:
    if seconds > settings.max_video_seconds:
        raise SampleError(
            "video_too_long",
            f"video '{path.name}' lasts {seconds:.0f} s. At most {settings.max_video_seconds:.0f} s are allowed. Cut "
            "the file, or raise media.max_video_seconds.",
        )
    if total > settings.max_video_frames:
        raise SampleError(
            "video_too_long",
            f"video '{path.name}' has {total} frames. At most {settings.max_video_frames} are allowed. Cut the file, "
            "or raise media.max_video_frames.",
        )


def _corrupt(path: Path, cause: str) -> SampleError:
    return SampleError(
        "corrupt_media",
        f"video '{path.name}' cannot be decoded: {cause}. A complete file in a codec that the chosen decoder knows is "
        "needed. Fetch or re-encode the file, set media.decoder=auto, or remove the sample.",
    )
