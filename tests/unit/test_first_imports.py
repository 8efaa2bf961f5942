"""What a command imports first is not looked through for garbage, and leaves no trace at the end of its process."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from vlm_pg.commands import imported_at_once

PROGRAM = """
import gc
from vlm_pg.commands import imported_at_once

full = []
gc.callbacks.append(lambda phase, what: full.append(what["generation"]))
with imported_at_once():
    from vlm_pg.training.main import train
assert not full, full
assert gc.isenabled() and gc.get_freeze_count() > 100_000
"""


@pytest.mark.matrix
def test_a_command_s_imports_are_left_alone_by_the_collector() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # What is frozen at the end counts as leaked, and triton says so.
    assert "leaked" not in done.stderr


def test_a_command_that_imports_torch_later_leaves_nothing_out() -> None:
    """``vlm-pg bench``, which imports torch after its options are read."""
    program = """
import gc, sys
from vlm_pg.commands import imported_at_once

with imported_at_once():
    import vlm_pg.bench.step
assert "torch" not in sys.modules
assert gc.isenabled() and not gc.get_freeze_count()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_where_torch_is_imported_already_it_changes_nothing() -> None:
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with imported_at_once():
        assert gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == before
