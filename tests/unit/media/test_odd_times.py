"""Times that do not say when a frame is shown: the frames are those that a player shows then, or the file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_clips import encode
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import decode_video
from vlm_pg.media.settings import MediaSettings

RATE = 40  # milliseconds a frame


@pytest.mark.parametrize("late", [0, 1540], ids=["same-clock", "between"])
@pytest.mark.parametrize(("codec", "suffix"), [("libx264", "ts"), ("mpeg2video", "ts"), ("mpeg2video", "vob")])
def test_a_clock_that_goes_back(codec: str, suffix: str, late: int, tmp_path: Path) -> None:
    """Two files joined byte by byte: the frames of the second lie among those of the first."""
    clock = 1000 if codec == "libx264" else 25
    tick = RATE * clock // 1000
    parts = [
        encode(
            tmp_path / f"{first}.{suffix}", [start + tick * place for place in range(40)], codec, first, clock, bf="2"
        )
        for first, start in ((0, 0), (500, late * clock // 1000))
    ]
    (tmp_path / "joined.mkv").write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(SampleError, match=r"clock goes back from \d\.\d{3} s to \d\.\d{3} s, .* Remux it") as got:
        decode_video(tmp_path / "joined.mkv", MediaSettings(), 28)
    assert got.value.reason == "corrupt_media"
