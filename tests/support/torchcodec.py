"""Whether torchcodec runs here: it needs an FFmpeg of the system, which this project does not install."""

from __future__ import annotations

import pytest

from vlm_pg.errors import ConfigError
from vlm_pg.media.video_decoders import check_installed


def require_torchcodec() -> None:
    """Skip the test where torchcodec, or an FFmpeg that it can load, is missing."""
    try:
        check_installed()
    except ConfigError as error:
        pytest.skip(str(error).split(". ")[0])
