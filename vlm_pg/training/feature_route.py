"""Visual features on their way from the ranks that made them to those that train on them, and their gradients back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.distributed import RankLayout, exchange_rows, gather_objects


@dataclass(frozen=True)
class Passage:
    """One prompt's features on their way between data ranks: ``rows`` of them, by the key of their media."""

    media_key: str
    rows: int
    origin: int
    destination: int


@dataclass(frozen=True)
class Arrived:
    """``features``: [rows, ...] by the key of their media. ``nothing``: no rows, of the same kind."""

    features: Mapping[str, torch.Tensor]
    nothing: torch.Tensor


# Of each process, in the order in which their rows are sent.
Passages = Sequence[Sequence[Passage]]


class FeatureRoute:
    """Which process sends what to which; the same passages on every rank.

    All sequence ranks of a data rank hold all its features, and all of another one need what it gets. So each sends to
    the one in its own place there, and gets that one's gradient: the sum over places is what the passes there owe.
    """

    def __init__(self, ranks: RankLayout, passages: Iterable[Passage]):
        ordered = sorted(set(passages), key=lambda p: (p.origin, p.destination, p.media_key))
        self.is_empty = not ordered
        self._sends: list[list[Passage]] = [[] for _ in range(ranks.world_size)]
        self._receives: list[list[Passage]] = [[] for _ in range(ranks.world_size)]
        for passage in ordered:
            if passage.origin == ranks.data_rank:
                self._sends[_process(ranks, passage.destination)].append(passage)
            if passage.destination == ranks.data_rank:
                self._receives[_process(ranks, passage.origin)].append(passage)

    @torch.no_grad()
    def carry(self, features: Mapping[str, torch.Tensor], device: torch.device) -> Arrived:
        """What other data ranks made. A collective.

        Args:
            features: what was made here, [rows, ...] by the key of its media.
        """
        if self.is_empty:
            return Arrived({}, torch.empty(0))
        sent = [features[passage.media_key] for passage in _in_order(self._sends)]
        # Who sends nothing does not know of what kind the others' tensors are.
        kinds = gather_objects((tuple(sent[0].shape[1:]), sent[0].dtype) if sent else None)
        shape, dtype = next(kind for kind in kinds if kind is not None)
        nothing = torch.empty((0, *shape), dtype=dtype, device=device)
        rows = exchange_rows(torch.cat([nothing, *sent]), _rows(self._sends), _rows(self._receives))
        received = _in_order(self._receives)
        parts = rows.split([passage.rows for passage in received]) if received else ()
        return Arrived({p.media_key: part.clone() for p, part in zip(received, parts, strict=True)}, nothing)

    @torch.no_grad()
    def bring_back(self, gradients: Mapping[str, torch.Tensor], nothing: torch.Tensor) -> dict[str, torch.Tensor]:
        """What other data ranks' passes add to the gradients of features made here, in fp32. A collective.

        Args:
            gradients: of everything that arrived.
            nothing: as it arrived with it.
        """
        if self.is_empty:
            return {}
        sent = [gradients[passage.media_key] for passage in _in_order(self._receives)]
        rows = exchange_rows(torch.cat([nothing, *sent]), _rows(self._receives), _rows(self._sends))
        received = _in_order(self._sends)
        sums: dict[str, torch.Tensor] = {}
        for passage, part in zip(received, rows.split([p.rows for p in received]) if received else (), strict=True):
            known = sums.get(passage.media_key)
            # bf16 has 8 bits of mantissa, and there may be many destinations.
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            sums[passage.media_key] = wide if known is None else known + wide
        return sums


def _process(ranks: RankLayout, data_rank: int) -> int:
    return data_rank * ranks.sequence_size + ranks.sequence_rank


def _in_order(of_processes: Passages) -> list[Passage]:
    return [passage for of_process in of_processes for passage in of_process]


def _rows(of_processes: Passages) -> list[int]:
    return [sum(passage.rows for passage in of_process) for of_process in of_processes]
