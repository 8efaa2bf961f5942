"""What decodes and resizes here, as far as pixels depend on it.

Measured on seven real videos: FFmpeg converts colours otherwise where the processor lacks SSSE3, torch resizes
otherwise without AVX2. From there up to AVX-512 all frames were equal. So machines differ by their architecture and by
what torch makes of their vector instructions, and a machine can fill the cache of another one of its kind.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from vlm_pg.cache.provenance import gpu_driver, gpu_models, source_digest

# A folder of pictures is a video that Pillow decodes.
MadeOf = Literal["image", "video", "folder"]
_HERE = Path(__file__).parent
_ALWAYS = ("qwen-vl-utils", "webvtt-py")
# PyAV reads the index of a video whatever decodes it.
_OF_KIND: Mapping[MadeOf, tuple[str, ...]] = {
    "image": ("pillow",),
    "video": ("av", "torch"),
    "folder": ("pillow", "torch"),
}
_PILLOW_LIBRARIES = ("jpg", "libjpeg_turbo", "webp", "zlib", "zlib_ng")


@cache
def made_with(kind: MadeOf, decoder: str, device: str) -> Mapping[str, Any]:
    """Of media of a kind, JSON values by which frames of the same file and settings can differ.

    Our own code is all of this package's: what is left out of a list would be forgotten.

    Args:
        decoder, device: as in the settings.
    """
    chosen = decoder in ("decord", "torchcodec") and kind != "folder"
    packages = (*_ALWAYS, *_OF_KIND[kind], *((decoder,) if chosen else ()))
    return {
        "code": source_digest(_HERE.glob("*.py")),
        "packages": {package: _version(package) for package in packages},
        "machine": platform.machine(),
        **(_of_video(decoder, device) if kind == "video" else _of_image()),
        **({"instructions": _instructions()} if kind == "folder" else {}),
    }


def _instructions() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _of_image() -> dict[str, Any]:
    from PIL import features

    return {"pillow": {name: features.version(name) for name in _PILLOW_LIBRARIES}}


def _of_video(decoder: str, device: str) -> dict[str, Any]:
    import av

    found: dict[str, Any] = {
        "ffmpeg": [av.ffmpeg_version_info, av.library_versions],
        "instructions": _instructions(),
    }
    if decoder == "torchcodec":
        from vlm_pg.media.torchcodec_decoder import ffmpeg_versions

        found["torchcodec's ffmpeg"] = ffmpeg_versions()
    return found if device == "cpu" else {**found, "gpu": _gpu()}


def _gpu() -> list[str]:
    """A process that finds all frames in the cache need not start CUDA, unless nothing else says what GPU it is."""
    models = gpu_models()
    if not models:
        import torch

        from vlm_pg.media.torchcodec_decoder import gpu_number

        models = [torch.cuda.get_device_name(gpu_number())]
    return [*models, *gpu_driver()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
