"""What the user can choose about media."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vlm_pg.settings import Settings

# Over an hour of video at four frames a second.
MAX_FRAMES_LIMIT = 16_384


class MediaSettings(Settings):
    """How many frames at which size are read, within which limits, by how many workers."""

    frames: Literal["fps", "uniform"] = Field(
        "fps",
        description="fps: media.fps frames per second, at least min_frames, at most max_frames. uniform: num_frames "
        "evenly spaced frames of every video or clip. Both select frames as qwen-vl-utils does. If a record lists "
        "timestamps, the frames shown at these times are used instead.",
    )
    fps: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="Frames sampled per second of video, before min_frames and max_frames are applied.",
    )
    min_frames: int = Field(4, ge=2, le=MAX_FRAMES_LIMIT, description="Minimum number of frames (rounded up to even).")
    max_frames: int = Field(
        16, ge=2, le=MAX_FRAMES_LIMIT, description="Maximum number of frames (rounded down to even)."
    )
    num_frames: int | None = Field(
        None,
        ge=2,
        le=MAX_FRAMES_LIMIT,
        multiple_of=2,
        description="Number of frames; required with frames=uniform, otherwise not allowed. A video with fewer frames "
        "is rejected.",
    )
    last_frame: Literal["as_sampled", "always"] = Field(
        "as_sampled",
        description="always, for questions about a video's last frame: reject clips and timestamps that end before it "
        "and, regardless of max_missing_share, files that are more than half a frame (0.05 s if that is less) shorter "
        "than their header states.",
    )
    video_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of visual tokens per video: frames / 2 * (height / f) * (width / f), with f the "
        "side of a merged patch in pixels. A video above it is first scaled down (to no less than min_pixels), then "
        "loses frames (to no fewer than min_frames).",
    )
    min_pixels: int = Field(4 * 28 * 28, ge=1, description="Smaller video frames are scaled up to at least this area.")
    max_pixels: int = Field(128 * 28 * 28, ge=1, description="Larger video frames are scaled down to this area.")
    image_min_pixels: int = Field(4 * 28 * 28, ge=1, description="Smaller images are scaled up to at least this area.")
    image_max_pixels: int = Field(1280 * 28 * 28, ge=1, description="Larger images are scaled down to this area.")
    max_header_pixels: int = Field(
        64_000_000,
        ge=1,
        le=170_000_000,
        description="An image with a larger area in its header is rejected before anything is decoded.",
    )
    max_video_frame_pixels: int = Field(
        36_000_000, ge=1, description="A video with a larger frame area in its header is rejected before decoding."
    )
    max_video_seconds: float = Field(
        4 * 3600.0, gt=0, description="A video that is longer according to its header or timestamps is rejected."
    )
    max_video_frames: int = Field(2_000_000, ge=2, description="A video with more stored frames is rejected.")
    max_missing_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="A video is rejected as truncated if a larger share of the duration in its header is missing.",
    )
    workers: int = Field(
        2,
        ge=0,
        le=256,
        description="Number of decoding processes; 0: decode in the main process, without time and memory limits.",
    )
    deadline_seconds: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Time limit per file; on timeout the file is skipped and the worker restarted.",
    )
    worker_memory_bytes: int = Field(
        4 << 30,
        ge=256 << 20,
        description="Memory that a decoding process may use for a file, beyond what it uses at its start.",
    )
    decoder: Literal["auto", "decord", "pyav", "torchcodec"] = Field(
        "auto",
        description="auto: PyAV. It is exact on intact files and rejects most damaged ones; a damaged file that "
        "is not rejected may give wrong frames, as with decord and torchcodec (docs/data.md).",
    )
    decoder_device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="cuda: torchcodec decodes in the workers on this process's GPU, if the GPU supports the codec. "
        "Colours may differ from the CPU's by rounding.",
    )
    max_subtitle_bytes: int = Field(4 << 20, ge=1, le=1 << 28, description="A larger subtitle file is rejected.")
    max_remote_bytes: int = Field(1 << 30, ge=1, description="Maximum size of a download, if remote media are allowed.")
    remote_timeout_seconds: float = Field(
        20.0, gt=0, description="Maximum time without data from the server during a download."
    )
    remote_private_hosts: tuple[str, ...] = Field(
        (), description="Hosts, as written in URLs, that may resolve to loopback or private addresses; others may not."
    )

    @model_validator(mode="after")
    def _ranges_are_not_empty(self) -> MediaSettings:
        if self.min_frames + self.min_frames % 2 > self.max_frames - self.max_frames % 2:
            raise ValueError(
                f"min_frames is {self.min_frames} and max_frames is {self.max_frames}: no even number of frames lies "
                "between them. Raise max_frames or lower min_frames."
            )
        if (self.num_frames is None) == (self.frames == "uniform"):
            raise ValueError(
                f"frames is {self.frames} and num_frames is {self.num_frames}: num_frames says how many frames uniform "
                "shows, and is for that alone. Give both, or neither."
            )
        if self.decoder_device == "cuda" and self.decoder != "torchcodec":
            raise ValueError(
                f"decoder_device is cuda and decoder is {self.decoder}, which decodes on the CPU alone. Set "
                "decoder=torchcodec, or leave decoder_device out."
            )
        if self.video_tokens is not None and self.video_tokens < self.fewest_frames // 2:
            raise ValueError(
                f"video_tokens is {self.video_tokens}, fewer than the one for every two frames that "
                f"{self.fewest_frames} frames need. Raise video_tokens or lower min_frames."
            )
        for low, high in (("min_pixels", "max_pixels"), ("image_min_pixels", "image_max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"{low} is {getattr(self, low)} and {high} is {getattr(self, high)}: the least area must not "
                    f"exceed the largest. Raise {high} or lower {low}."
                )
        return self

    @property
    def most_frames(self) -> int:
        """Most frames that are shown of a video whose record names no moments."""
        return self.max_frames - self.max_frames % 2 if self.num_frames is None else self.num_frames

    @property
    def fewest_frames(self) -> int:
        """How far the token budget may lower the number of frames."""
        return min(self.min_frames + self.min_frames % 2, self.most_frames)
