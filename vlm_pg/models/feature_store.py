"""A frozen vision tower's outputs on disk, shared by processes, runs and evaluations.

An entry's key has the media, the tower, the division of the media over its calls, and the machine with its switches, so
a hit is bit for bit the tower's output here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vlm_pg.cache.store import Entry, Store, key_of
from vlm_pg.models.digests import numerics_digest
from vlm_pg.models.tower import Grid, shares
from vlm_pg.types import Prompt

KIND = "features"
# Version of the layout of an entry.
_LAYOUT = 1
_FEATURES = "features"

CallsOf = Callable[[Sequence[Grid]], list[tuple[Grid, ...]]]


class FeatureStore:
    """Features of prompts, computed by one tower.

    Where several processes compute those of a prompt together, each its frames, ``hosts`` has ``host`` of each, in
    order.

    Args:
        tower: ``tower_digest`` of it.
        calls_of: divides these frames over calls of the tower by one process; another division may give other bits.
        device: the tower's.
        shape: of the features of one visual token, (D,) or (1 + E, D).
    """

    def __init__(self, store: Store, tower: str, calls_of: CallsOf, device: torch.device, shape: tuple[int, ...]):
        self.store, self._tower, self._calls_of = store, tower, calls_of
        self._device, self._shape = device, shape

    @property
    def host(self) -> str:
        """``numerics_digest`` of this process now."""
        return numerics_digest(self._device)

    def read(self, prompt: Prompt, hosts: Sequence[str] = ()) -> Tensor | None:
        """[M, ...] on the CPU as computed by ``hosts``, by default this process; None where there is no entry."""
        key = self._key(prompt, hosts)
        entry = self.store.read(key)
        if entry is None:
            return None
        try:
            values = torch.from_numpy(entry.tensors[_FEATURES].copy())  # torch warns about read-only buffers
            features = values.view(getattr(torch, entry.about["dtype"]))
            if features.is_floating_point() and features.shape == (prompt.num_visual_tokens, *self._shape):
                return features
        except (KeyError, AttributeError, TypeError, RuntimeError, ValueError):
            pass  # anything may be in the file, such as a dtype that does not fit its bytes
        self.store.remove_damaged(key)
        return None

    def write(self, prompt: Prompt, features: Tensor, hosts: Sequence[str] = ()) -> None:
        """Write features [M, ...] that ``hosts``, by default this process, have computed; warn if the disk fails or is
        full."""
        self.store.keep(self._key(prompt, hosts), _entry(features), "visual features", "computed")

    def _key(self, prompt: Prompt, hosts: Sequence[str]) -> str:
        """One frame on two processes is the same call as on one, and so is an undivided video: the keys are equal."""
        assert prompt.grid_thw is not None
        hosts = hosts or [self.host]
        parts = shares(prompt.grid_thw.tolist(), len(hosts))
        made = [(host, part) for host, part in zip(hosts, parts, strict=True) if part.patches]
        calls = [(host, call) for host, part in made for call in self._calls_of(part.grids)]
        return key_of({"layout": _LAYOUT, "media": prompt.content_key, "tower": self._tower, "calls": calls})


def _entry(features: Tensor) -> Entry:
    """numpy has no bfloat16: its bits are stored as integers."""
    values = features.detach().cpu().contiguous()
    dtype = str(values.dtype).removeprefix("torch.")
    array: np.ndarray = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
    return Entry({_FEATURES: array}, {"dtype": dtype})
