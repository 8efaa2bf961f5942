"""One file to one ``DecodedMedia``: what a worker process runs.

Shape letters: F frames.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vlm_pg.errors import SampleError
from vlm_pg.media import sampling
from vlm_pg.media.boundary import DecodeFailure
from vlm_pg.media.complete import missing
from vlm_pg.media.container import VideoHeader, header_of, open_video
from vlm_pg.media.images import decode_image
from vlm_pg.media.index import TooManyFrames, VideoIndex, index_of
from vlm_pg.media.parent import ask
from vlm_pg.media.remote import download
from vlm_pg.media.seeking import FrameTooLarge
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.urls import shown_url
from vlm_pg.media.video_decoders import Decoder, DecordDecoder, PyAVDecoder
from vlm_pg.types import DecodedMedia, MediaKind

# decoded frames are resized in runs, so that a long video in 4K does not fill the memory
RUN_BYTES = 256 << 20


def decode_file(kind: MediaKind, path: str, settings: MediaSettings, factor: int) -> DecodedMedia:
    """Decode a local file, or download and decode a URL.

    Raises:
        SampleError: for anything that is wrong with the file.
    """
    name = shown_url(path) if "://" in path else Path(path).name
    try:
        if "://" in path:
            # A download has no name in any folder, so that nothing stays behind when this process is killed.
            with download(path, settings) as file:
                return _decode_local(kind, Path(f"/proc/self/fd/{file.fileno()}"), name, settings, factor)
        return _decode_local(kind, Path(path), name, settings, factor)
    except MemoryError as error:
        raise SampleError(
            "out_of_memory",
            f"{kind} '{name}' does not fit into memory while it is decoded (media.worker_memory_bytes is "
            f"{settings.worker_memory_bytes}). Files within the size limits should. Scale the file down, or raise "
            "media.worker_memory_bytes.",
        ) from error


def _decode_local(kind: MediaKind, path: Path, name: str, settings: MediaSettings, factor: int) -> DecodedMedia:
    if kind == "image":
        return decode_image(path, settings, factor, name)
    return decode_video(path, settings, factor, name)


def decode_video(path: Path, settings: MediaSettings, factor: int, name: str = "") -> DecodedMedia:
    """Sample, decode, turn upright and resize a video; see ``decode_file``. ``name``: what messages call it."""
    name = name or path.name
    try:
        header, index = _survey(path, name, settings)
    except DecodeFailure as error:
        raise _corrupt(name, error) from error
    pts_seconds = index.pts_seconds
    total = len(pts_seconds)
    _check_length(name, pts_seconds[-1] - pts_seconds[0], settings)
    _check_complete(name, header, index, settings)
    video_fps = sampling.average_fps(pts_seconds, header.stated_fps) if total > 1 else header.stated_fps or 1.0
    bounds = settings.min_frames, settings.max_frames
    count = ask(sampling.num_sampled_frames, total, video_fps, settings.fps, *bounds)
    indices = sampling.frame_indices(total, count)
    frames, decoder = _read_frames(path, name, index, indices, settings, factor)
    return DecodedMedia(
        kind="video",
        frames=frames,
        # Some containers (MPEG-TS) start counting anywhere; viewers and Qwen's own reader count from the first frame.
        frame_seconds=tuple(pts_seconds[place] - pts_seconds[0] for place in indices),
        sampled_fps=sampling.sampled_fps(count, total, video_fps),
        decoder=decoder,
    )


def _survey(path: Path, name: str, settings: MediaSettings) -> tuple[VideoHeader, VideoIndex]:
    """What the file says about itself, limits tested as soon as each part is read."""
    with open_video(path, settings.max_video_frame_pixels) as (container, stream):
        header = header_of(container, stream)
        _check_header(name, header, settings)
        try:
            return header, index_of(container, stream, settings.max_video_frames)
        except TooManyFrames as error:
            raise SampleError(
                "video_too_long",
                f"video '{name}' has more frames than {settings.max_video_frames}, the most that are allowed. Cut the "
                "file, or raise media.max_video_frames.",
            ) from error


def _read_frames(
    path: Path, name: str, index: VideoIndex, indices: list[int], settings: MediaSettings, factor: int
) -> tuple[np.ndarray, str]:
    """The frames, and the decoder that read them."""
    try:
        decoder = _open_decoder(path, index, settings)
        try:
            return _read_resized(decoder, indices, settings, factor), decoder.name
        finally:
            decoder.close()
    except FrameTooLarge as error:
        raise _too_large(name, str(error), settings) from error
    except DecodeFailure as error:
        raise _corrupt(name, error) from error


def _open_decoder(path: Path, index: VideoIndex, settings: MediaSettings) -> Decoder:
    """``auto`` is the decoder that is exact or fails, whatever the container and the stream."""
    if settings.decoder == "decord":
        return DecordDecoder(path, index)
    return PyAVDecoder(path, index, settings.max_video_frame_pixels)


def _read_resized(decoder: Decoder, indices: list[int], settings: MediaSettings, factor: int) -> np.ndarray:
    """The frames ``indices`` at the tower's size: uint8 [F, 3, height, width]."""
    max_pixels = sampling.video_max_pixels(len(indices), settings.min_pixels, settings.max_pixels, factor)
    first = decoder.read(indices[:1])
    stored = first.shape[1], first.shape[2]
    height, width = ask(sampling.resized_size, *stored, settings.min_pixels, max_pixels, factor)
    run = max(1, RUN_BYTES // first.nbytes)
    parts = [resize_frames(first, height, width)]
    for start in range(1, len(indices), run):
        parts.append(resize_frames(decoder.read(indices[start : start + run]), height, width))
    return np.concatenate(parts)


def resize_frames(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic with antialiasing, rounded back to uint8, exactly as torchvision's ``resize`` does on uint8 tensors.

    torchvision itself is not imported: it would double the start-up time of the workers.

    Args:
        frames: uint8 [F, H, W, 3].

    Returns:
        uint8 [F, 3, height, width].
    """
    resized = np.empty((len(frames), 3, height, width), dtype=np.uint8)
    for index, frame in enumerate(frames):  # one at a time: the float copy of all of them is four times their size
        pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if pixels.shape[2:] != (height, width):
            pixels = _scale(pixels, height, width)
        resized[index] = pixels[0].numpy()
    return resized


def _scale(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    try:
        scaled = torch.nn.functional.interpolate(
            pixels.float(), size=(height, width), mode="bicubic", align_corners=False, antialias=True
        )
        return scaled.clamp(0, 255).round().to(torch.uint8)
    except RuntimeError as error:
        if "allocate memory" in str(error):  # torch has no type of its own for it on a CPU
            raise MemoryError(str(error)) from error
        raise


def _check_header(name: str, header: VideoHeader, settings: MediaSettings) -> None:
    """Refuse by what the header states, before anything is decoded."""
    if header.width * header.height > settings.max_video_frame_pixels:
        raise _too_large(name, f"it has frames of {header.width}x{header.height} pixels", settings)
    if header.width and header.height:
        sampling.check_aspect_ratio(header.height, header.width)
    _check_length(name, header.duration_seconds, settings)


def _check_length(name: str, seconds: float, settings: MediaSettings) -> None:
    if seconds > settings.max_video_seconds:
        raise SampleError(
            "video_too_long",
            f"video '{name}' lasts {seconds:.0f} s. At most {settings.max_video_seconds:.0f} s are allowed. Cut "
            "the file, or raise media.max_video_seconds.",
        )


def _check_complete(name: str, header: VideoHeader, index: VideoIndex, settings: MediaSettings) -> None:
    stated_seconds, there_seconds = missing(header, index)
    if stated_seconds - there_seconds > settings.max_missing_share * stated_seconds:
        raise SampleError(
            "truncated_media",
            f"video '{name}' is cut off: its header states {stated_seconds:.1f} s, {there_seconds:.1f} s are there. "
            f"At most a share of {settings.max_missing_share:g} may be missing. Fetch the file again, or raise "
            "media.max_missing_share.",
        )


def _too_large(name: str, cause: str, settings: MediaSettings) -> SampleError:
    return SampleError(
        "video_too_large",
        f"video '{name}' is too large: {cause}. At most {settings.max_video_frame_pixels} pixels are allowed. Scale "
        "the file down, or raise media.max_video_frame_pixels.",
    )


def _corrupt(name: str, cause: DecodeFailure) -> SampleError:
    return SampleError(
        "corrupt_media",
        f"video '{name}' cannot be decoded: {cause}. A complete file in a codec that the chosen decoder knows is "
        "needed. Fetch or re-encode the file, set media.decoder=auto, or remove the sample.",
        cause.trace,
    )
