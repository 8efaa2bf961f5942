"""A frozen tower runs once, ever: its outputs on disk, by what they were made of.

Media, the tower and how the media are divided over its calls are an entry's key, so what comes back is bit for bit what
the tower would give, whichever process, run or evaluation asks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vlm_pg.cache.entry_file import Entry
from vlm_pg.cache.store import Store, key_of
from vlm_pg.models.vision_pieces import Grid, shares
from vlm_pg.types import Prompt

KIND = "features"
# How features are laid out in an entry, and what ``Family.encode_vision`` makes of a tower's output.
_LAYOUT = 1
_FEATURES = "features"

CallsOf = Callable[[Sequence[Grid]], list[tuple[Grid, ...]]]


class KeptFeatures:
    """Features of prompts, made by one tower.

    Args:
        tower: ``tower_digest`` of it.
        calls_of: the calls in which a process runs the tower on these frames, one after the other; each may have bits
            of its own, as sums are divided otherwise.
    """

    def __init__(self, store: Store, tower: str, calls_of: CallsOf):
        self.store, self._tower, self._calls_of = store, tower, calls_of

    def read(self, prompt: Prompt, processes: int = 1) -> torch.Tensor | None:
        """[M, ...] on the CPU as ``processes`` make them of the prompt together; None where there are none."""
        entry = self.store.read(self._key(prompt, processes))
        if entry is None:
            return None
        values = torch.from_numpy(entry.tensors[_FEATURES].copy())  # what is read cannot be written, and torch warns
        return values.view(getattr(torch, entry.about["dtype"]))

    def write(self, prompt: Prompt, features: torch.Tensor, processes: int = 1) -> None:
        """Keep features [M, ...] that ``processes`` have made. A disk that fails is a warning."""
        try:
            self.store.write(self._key(prompt, processes), _entry(features))
        except OSError as error:  # features are there all the same
            warnings.warn(
                f"cache.folder '{self.store.folder}' cannot be written ({error.strerror}): visual features are "
                "computed again. Make room, or lower cache.max_gb.",
                stacklevel=2,
            )

    def _key(self, prompt: Prompt, processes: int) -> str:
        """One frame on two processes is the same call as on one, and so is a video that is not cut: then the key is."""
        assert prompt.grid_thw is not None
        parts = [part for part in shares(prompt.grid_thw.tolist(), processes) if part.patches]
        calls = [call for part in parts for call in self._calls_of(part.grids)]
        return key_of({"layout": _LAYOUT, "media": prompt.content_key, "tower": self._tower, "calls": calls})


def _entry(features: torch.Tensor) -> Entry:
    """numpy has no bfloat16: its bits are kept as those of integers."""
    values = features.detach().cpu().contiguous()
    dtype = str(values.dtype).removeprefix("torch.")
    array: np.ndarray = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
    return Entry({_FEATURES: array}, {"dtype": dtype})
