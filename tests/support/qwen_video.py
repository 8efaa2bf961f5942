"""What qwen-vl-utils does with a video of given numbers: its own ``fetch_video`` without any file or pixel."""

from __future__ import annotations

from typing import Any

import torch


def fetch(monkeypatch: Any, height: int, width: int, total: int, fps: float) -> Any:
    """A function from settings (as in a chat message) and a factor to indices, rate, height and width.

    Its reader is the package's own in all but the pixels, which have no memory; its resizing only writes the size down.
    """
    from qwen_vl_utils import vision_process as theirs

    sizes: list[tuple[int, int]] = []
    video = {"height": height, "width": width, "total": total, "fps": fps}

    def read(element: dict[str, Any]) -> Any:
        start, end, count = theirs.calculate_video_frame_range(element, video["total"], video["fps"])
        frames = theirs.smart_nframes(element, total_frames=count, video_fps=video["fps"])
        indices = torch.linspace(start, end, frames).round().long().tolist()
        pixels = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(frames, 3, video["height"], video["width"])
        return pixels, {"frames_indices": indices}, frames / max(count, 1e-6) * video["fps"]

    def resize(pixels: torch.Tensor, size: list[int], **_: Any) -> torch.Tensor:
        sizes.append((size[0], size[1]))
        return pixels[:1, :1, :1, :1]

    # a reader that fails is followed by torchvision's
    monkeypatch.setattr(theirs, "VIDEO_READER_BACKENDS", {"decord": read, "torchvision": read})
    monkeypatch.setattr(theirs, "get_video_reader_backend", lambda: "decord")
    monkeypatch.setattr(theirs.transforms.functional, "resize", resize)
    monkeypatch.setattr(theirs.logger, "disabled", True)

    def ask(element: dict[str, Any], factor: int, **changes: Any) -> tuple[list[int], float, int, int]:
        video.update(changes)
        (_, metadata), rate = theirs.fetch_video(
            {"video": "no file", **element},
            image_patch_size=factor // 2,
            return_video_sample_fps=True,
            return_video_metadata=True,
        )
        return metadata["frames_indices"], rate, *sizes.pop()

    return ask
