"""Paths of media that must not be read, and the folder they are about."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# kind, path, reason, message; of the folder that ``make_root`` makes
REFUSALS = [
    ("video", "../../../../etc/passwd", "outside_root", r"leaves the data root .* Only files below .*media_root"),
    ("video", "../outside.mp4", "outside_root", "leaves the data root"),
    ("video", "link_out.mp4", "outside_root", "once '..' and links are resolved"),
    ("video", "/etc/passwd", "outside_root", "leaves"),
    ("video", "file:///etc/passwd", "outside_root", "leaves"),
    ("video", "none.mp4", "missing_media", r"names no file in the data root .* are expected\. Fetch the file"),
    ("video", "a\0.mp4", "missing_media", r"'a\?\.mp4' cannot be looked up: .* is expected\. Correct the path"),
    ("video", "x" * 5000 + ".mp4", "missing_media", r"x\.\.\.x.*cannot be looked up"),
    ("video", "loop.mp4", "missing_media", "loop.mp4"),
    (
        "video",
        "deep",
        "unsupported_media",
        r"is not a regular file\. Only video files can be read\. A folder of numbered pictures is read where",
    ),
    ("video", "", "unsupported_media", "is not a regular file"),
    ("video", "d.txt", "unsupported_media", r"ends in '\.txt'\. A video may end in \.mp4, .* Convert the file"),
    ("video", "c.png", "unsupported_media", "or correct data_type"),
    ("image", "a.mp4", "unsupported_media", r"An? image may end in \.jpg"),
    ("video", "http://127.0.0.1:9/never.mp4", "remote_media", r"is a URL\. Files under .* set that option"),
    ("video", "s3://bucket/a.mp4", "remote_media", "is a URL"),
]


def make_root(root: Path, contents: Mapping[str, bytes] | None = None) -> Path:
    """Files inside and outside of a data root, and links. ``contents``: by ending, where names are not enough."""
    known = contents or {}
    (root / "deep").mkdir(parents=True)
    for name in ("a.mp4", "deep/B.MKV", "c.png", "d.txt"):
        (root / name).write_bytes(known.get(Path(name).suffix, b"x"))
    (root.parent / "outside.mp4").write_bytes(known.get(".mp4", b"x"))
    (root / "link_out.mp4").symlink_to(root.parent / "outside.mp4")
    (root / "link_in.mp4").symlink_to(root / "a.mp4")
    (root / "loop.mp4").symlink_to(root / "loop.mp4")
    return root
