"""Processes that the command needs, started once for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from data_pipelines.engine import report
from tests.support.kept_templates import KeptTemplates
from vlm_pg.answers.grading import PREPARE
from vlm_pg.answers.pool import CheckerPool
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.rewards import rewarder
from vlm_pg.rewards.settings import CheckerSettings


@pytest.fixture(scope="module", autouse=True)
def processes_once(templates: KeptTemplates) -> Iterator[None]:
    """One decodes for all summaries, one checks mathematics: to start them takes longer than a whole command."""
    decoder, checker = decoding_pool(MediaSettings(workers=1)), CheckerPool(CheckerSettings(workers=1), [PREPARE])
    assert decoder is not None
    with templates.in_use(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MediaLoader", partial(MediaLoader, pool=decoder))
        patch.setattr(rewarder, "CheckerPool", lambda *settings: checker)
        patch.setattr(checker, "close", lambda: None)  # by the rewarder of one case
        yield
    checker.close()
    decoder.close()
