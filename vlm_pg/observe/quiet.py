"""Other libraries' chatter, kept out of what a run prints."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """No progress bars for loading a few tensors, no warning that a CPU machine has no accelerator. Errors stay."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
