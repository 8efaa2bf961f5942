"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.support.kept_templates import KeptTemplates

# qwen-vl-utils is compared with us as it reads by decord; where torchcodec is installed it would take that.
os.environ.setdefault("FORCE_QWENVL_VIDEO_READER", "decord")
# TRL's trainers would start a thread that reports them, and lives on beside the tests that fork.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Tiny models gain nothing from threads, and results then do not depend on how many cores a machine has.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # autograd starts with the first backward. Behind a fake tensor it would find a device that torch has put in a GPU's
    # place, and start a thread for it; after that no forked child can go back.
    torch.ones((), requires_grad=True).backward()
# How long an example takes says how busy the machine is, not whether the code is right. The usual tests say the same of
# the same code whenever they run; --hypothesis-profile=search looks for what nobody has found yet.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Libraries and thousands of tests stay until the end: garbage is not looked for among them each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """What is frozen at the end counts as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def templates() -> Iterator[KeptTemplates]:
    kept = KeptTemplates()
    yield kept
    kept.end()


@pytest.fixture
def kept_templates(templates: KeptTemplates) -> Iterator[KeptTemplates]:
    """For tests that start pool after pool, and are not about that: the process that workers come from stays."""
    with templates.in_use():
        yield templates


@pytest.fixture(scope="module")
def thawed() -> Iterator[None]:
    """Nothing is frozen while a file's tests run: a count then just thaws at its end what it froze.

    Where something was frozen before it looks for garbage first, among all that a test run has, and freezes again.
    """
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def _shared_folder(variable: str) -> Path:
    """The folder an environment variable names. Unset: the test is skipped. Set but absent: the test fails."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: this test needs the real files it points to")
    folder = Path(value)
    assert folder.is_dir(), f"{variable}={value} is set but is not a folder"
    return folder


@pytest.fixture
def media_dir() -> Path:
    """Real videos and the records about them."""
    return _shared_folder("VLM_PG_MEDIA")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real annotation files of public data sets."""
    return _shared_folder("VLM_PG_DATA")
