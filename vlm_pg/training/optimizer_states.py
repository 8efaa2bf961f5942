"""AdamW's states as slices that one rank holds, their files, and those of torch's AdamW.

A slice is identified by the weight's name, the kind of state and its first element in the flattened weight, so any
layout reads what another one wrote.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vlm_pg.distributed import RankLayout
from vlm_pg.errors import CheckpointError

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateSlice:
    """Elements ``first`` and following of the flattened state of one weight; ``values`` [n] is a view of it, fp32."""

    weight: str
    kind: Kind
    first: int
    values: torch.Tensor


class OptimizerStates(ABC):
    """The states of all trained weights, of which this rank holds some or all.

    ``shapes``: name -> shape of each whole weight. ``masters``: whether weights have an fp32 copy that takes updates.
    """

    shapes: Mapping[str, tuple[int, ...]]
    masters: bool

    @property
    @abstractmethod
    def updates(self) -> int:
        """AdamW's step; before the first update there are no moments."""

    @abstractmethod
    def slices(self) -> Iterator[StateSlice]:
        """Slices that this rank writes; all ranks together write everything."""

    @abstractmethod
    def blank(self, updates: int) -> Iterator[StateSlice]:
        """Yield zero-initialized states as after so many updates; each is filled before the next one is taken."""

    def kinds(self, updates: int) -> Sequence[Kind]:
        """Kinds of states of each weight after so many updates."""
        return (*(("master",) if self.masters else ()), *(MOMENTS if updates else ()))


def adam_state(like: torch.Tensor, updates: int, whole_steps: bool = False) -> dict[str, torch.Tensor | int]:
    """As AdamW makes it. ``whole_steps``: the step is an int, as in DeepSpeed's AdamW for CPUs."""
    state: dict[str, torch.Tensor | int] = {kind: torch.zeros_like(like, requires_grad=False) for kind in MOMENTS}
    return state | {"step": updates if whole_steps else torch.tensor(float(updates), dtype=torch.float32)}


class TorchStates(OptimizerStates):
    """Of torch's AdamW over ``trained`` (name -> the tensor that takes updates), replicated on every rank."""

    def __init__(
        self, trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, masters: bool, ranks: RankLayout
    ):
        self._trained, self._optimizer, self.masters, self._ranks = trained, optimizer, masters, ranks
        self.shapes = {name: tuple(weight.shape) for name, weight in trained.items()}

    @property
    def updates(self) -> int:
        states = [self._optimizer.state.get(weight, {}) for weight in self._trained.values()]
        return max((int(state.get("step", 0)) for state in states), default=0)

    def slices(self) -> Iterator[StateSlice]:
        """An equal share of every weight: states are replicated."""
        rank, of = self._ranks.rank, self._ranks.world_size
        for whole in self._whole(self.kinds(self.updates)):
            first, end = (whole.values.numel() * part // of for part in (rank, rank + 1))
            if end > first:
                yield StateSlice(whole.weight, whole.kind, first, whole.values[first:end])

    def blank(self, updates: int) -> Iterator[StateSlice]:
        for weight in self._trained.values() if updates else ():
            self._optimizer.state[weight] = adam_state(weight, updates)
        yield from self._whole(self.kinds(updates))

    def _whole(self, kinds: Sequence[Kind]) -> Iterator[StateSlice]:
        for name, weight in self._trained.items():
            for kind in kinds:
                state = weight.detach() if kind == "master" else self._optimizer.state[weight][kind]
                flat = state.reshape(-1)
                yield StateSlice(name, kind, 0, flat)
                if not state.is_contiguous():  # a copy was filled
                    state.copy_(flat.view(state.shape))


FOLDER, CONTENTS = "optimizer", "states.json"
# Of one file: so much of a GPU's states lies in the host's memory while it is written.
FILE_BYTES = 2**31


def write_states(folder: Path, states: OptimizerStates, ranks: RankLayout, file_bytes: int = FILE_BYTES) -> None:
    """This rank's states into ``folder``/optimizer, which all ranks share.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    folder = folder / FOLDER
    folder.mkdir(exist_ok=True)
    for number, tensors in enumerate(_files(states.slices(), file_bytes)):
        save_file(tensors, folder / f"rank-{ranks.rank:05d}-{number:05d}.safetensors")
    if ranks.is_rank0:
        contents = Contents(updates=states.updates, masters=states.masters, weights=dict(states.shapes))
        (folder / CONTENTS).write_text(contents.model_dump_json(indent=2))


def _files(slices: Iterator[StateSlice], file_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    size = 0
    for piece in slices:
        # A copy: a slice from NVMe is valid until the next one only.
        tensors[f"{piece.weight}/{piece.kind}/{piece.first}"] = piece.values.to("cpu", torch.float32, copy=True)
        size += piece.values.nbytes
        if size >= file_bytes:
            yield tensors
            tensors, size = {}, 0
    if tensors:
        yield tensors


class Contents(BaseModel, frozen=True, strict=True):
    """Content of ``states.json``. ``weights``: name -> shape of every weight that was trained."""

    updates: int = Field(ge=0)
    masters: bool
    weights: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, checkpoint: Path) -> Contents:
        """
        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = checkpoint / FOLDER / CONTENTS
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{checkpoint} has no {FOLDER}/{CONTENTS}: another release or another program has written it. Resume "
                f"with that one, or start a new run with model.path={checkpoint}."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Resume from another checkpoint.") from error
        except ValidationError as error:
            raise CheckpointError(f"{path} has {first_fault(error)}. Resume from another checkpoint.") from error


def first_fault(error: ValidationError) -> str:
    """As ``no usable weights.x.0: Input should be a valid integer``."""
    fault = error.errors()[0]
    return f"no usable {'.'.join(map(str, fault['loc'])) or 'content'}: {fault['msg']}"


def read_states(checkpoint: Path, states: OptimizerStates) -> int:
    """Fill this rank's states from files of any number of ranks; the number of updates they had.

    Raises:
        CheckpointError: they are not those of the weights that train, are not whole or finite, or cannot be read.
    """
    contents = Contents.read(checkpoint)
    _check(checkpoint, contents, states)
    files = _StateFiles(checkpoint / FOLDER)
    for piece in states.blank(contents.updates):
        with torch.no_grad():
            files.fill(piece)
    return contents.updates


def _check(checkpoint: Path, contents: Contents, states: OptimizerStates) -> None:
    now = states.shapes
    differ = sorted(name for name in {*contents.weights, *now} if contents.weights.get(name) != now.get(name))
    if differ:
        name, words = differ[0], (contents.weights.get(differ[0]), now.get(differ[0]))
        had, has = ("none" if shape is None else f"one of shape {list(shape)}" for shape in words)
        raise CheckpointError(
            f"{checkpoint} has optimizer states of {len(contents.weights)} weights, and {len(now)} weights train; "
            f"{len(differ)} differ. The first is {name}: {had} there, {has} here. Resume with the model settings it "
            f"was written under, or start a new run with model.path={checkpoint}."
        )
    if contents.masters != states.masters:
        was, is_now = ("bf16" if masters else "fp32" for masters in (contents.masters, states.masters))
        raise CheckpointError(
            f"{checkpoint} was written with model.dtype={was}, and it is {is_now} now. Resume with model.dtype={was}, "
            f"or start a new run with model.path={checkpoint}."
        )


class _StateFiles:
    """Index of the slices in all (memory-mapped) files of a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        # (weight, kind) -> (first, end, path, file, key), by first element.
        self._slices: dict[tuple[str, str], list[tuple[int, int, Path, Any, str]]] = defaultdict(list)
        for path in sorted(folder.glob("rank-*.safetensors")):
            try:
                file = safe_open(path, "pt")
                for key in file.keys():  # noqa: SIM118  # no mapping
                    weight, kind, first = key.rsplit("/", 2)
                    part = file.get_slice(key)
                    if part.get_dtype() != "F32" or len(part.get_shape()) != 1:
                        raise ValueError(f"{key} is no run of fp32 numbers")
                    entry = (int(first), int(first) + part.get_shape()[0], path, file, key)
                    self._slices[weight, kind].append(entry)
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}. Resume from another checkpoint.") from error
        for slices in self._slices.values():
            slices.sort(key=lambda entry: entry[:2])

    def fill(self, piece: StateSlice) -> None:
        """Copy the elements from their files; stored slices may overlap, but leave no gap."""
        done, last = piece.first, piece.first + piece.values.numel()
        for first, end, path, file, key in self._slices[piece.weight, piece.kind]:
            if first > done or done == last:
                break
            until = min(end, last)
            if until <= done:
                continue
            stored = file.get_slice(key)[done - first : until - first]
            least, largest = map(float, torch.aminmax(stored))
            if not math.isfinite(largest - least) or (piece.kind == "exp_avg_sq" and least < 0):
                raise CheckpointError(
                    f"{path} has values from {least} to {largest} in {key}, which would make NaN of the weights. "
                    "Optimizer states must be finite, and exp_avg_sq not negative. Resume from another checkpoint."
                )
            piece.values[done - piece.first : until - piece.first].copy_(stored)
            done = until
        if done < last:
            raise CheckpointError(
                f"{self._folder} lacks {piece.kind} of {piece.weight} from element {done} to {last - 1}, or in part. "
                "Resume from another checkpoint."
            )
