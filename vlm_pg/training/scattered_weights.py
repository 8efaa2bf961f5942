"""Weights that lie with several ranks (ZeRO-3) as the files that ``save_pretrained`` writes, gathered one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from vlm_pg.models.lora import adapter_parameters, has_adapter
from vlm_pg.models.weights import is_shard, num_elements, whole_shape

WEIGHTS, INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
Gathered = Callable[[Iterable[torch.nn.Parameter]], AbstractContextManager[None]]


def save_scattered(model: Any, folder: Path, gathered: Gathered, is_writer: bool, shard_bytes: int) -> None:
    """Write a transformers model, or its adapter alone, into ``folder``; called on every rank.

    The writer holds up to one file's tensors and one weight beside its share, the other ranks one weight.

    Args:
        gathered: inside, these weights are whole on every rank. A collective.
        shard_bytes: of one file of weights; a larger tensor has a file of its own.
    """
    if has_adapter(model):
        with gathered(adapter_parameters(model)):
            if is_writer:
                model.save_pretrained(folder)
        return
    plan = _plan(model, shard_bytes)
    if plan is None:
        with gathered(model.parameters()):
            if is_writer:
                model.save_pretrained(folder, max_shard_size=shard_bytes)
        return
    if is_writer:
        model.save_pretrained(folder, state_dict={})  # configuration and code
    tensors: dict[str, torch.Tensor] = {}
    for name in plan.order:
        whole = _whole(model, name, gathered, is_writer)
        for made, tensor in plan.stored.made_of(whole).items() if is_writer else ():
            tensors[made] = tensor.contiguous()
            file = plan.files[made]
            if len(of_file := [made for made in tensors if plan.files[made] == file]) == plan.sizes[file]:
                save_file({made: tensors.pop(made) for made in of_file}, folder / file, metadata={"format": "pt"})
    if is_writer and len(plan.sizes) > 1:
        (folder / INDEX).write_text(plan.index)


@dataclass(frozen=True)
class _Plan:
    """``order``: of weights, as their tensors follow in the files. ``sizes``: how many tensors a file has."""

    stored: _AsStored
    order: list[str]
    files: dict[str, str]
    sizes: dict[str, int]
    index: str


def _plan(model: Any, shard_bytes: int) -> _Plan | None:
    """Names, shapes and files without any data; None where a tensor of the files is made of several weights."""
    from huggingface_hub import split_torch_state_dict_into_shards

    empty = _without_data(model)
    stored = _AsStored(model, empty)
    made_of = {name: _contiguous(stored.made_of({name: tensor})) for name, tensor in empty.items()}
    everything = _contiguous(stored.made_of(empty))
    apart = {made: tensor.shape for tensors in made_of.values() for made, tensor in tensors.items()}
    if apart != {made: tensor.shape for made, tensor in everything.items()}:
        return None
    split = split_torch_state_dict_into_shards(everything, filename_pattern=WEIGHTS, max_shard_size=shard_bytes)
    total = {"total_parameters": sum(map(num_elements, model.parameters())), **split.metadata}
    index = json.dumps({"metadata": total, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True) + "\n"
    place = {made: number for number, made in enumerate(everything)}
    order = sorted(made_of, key=lambda name: min(place[made] for made in made_of[name]))
    sizes = {file: len(names) for file, names in split.filename_to_tensors.items()}
    return _Plan(stored, order, split.tensor_to_filename, sizes, index)


def _without_data(model: Any) -> dict[str, torch.Tensor]:
    """Weights and buffers without data; of weights that are tied the one that transformers keeps."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    empty = {
        name: torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in (model._keys_to_ignore_on_save or ())
    }
    return remove_tied_weights_from_state_dict(empty, model)


class _AsStored:
    """Weights under the names, and cut as in the files that the model was read from.

    Conversions ask the model for shapes of weights, and gathered one by one most of them have none: they ask this.
    """

    def __init__(self, model: Any, whole: Mapping[str, torch.Tensor]):
        self._model, self._whole = model, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._whole[name]

    def made_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(cast(Any, self), dict(tensors))


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies: parts of a weight would count as the whole of it."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}


def _whole(model: Any, name: str, gathered: Gathered, is_writer: bool) -> dict[str, torch.Tensor]:
    """The writer's copy of one weight."""
    tensor = model.get_parameter_or_buffer(name)
    with gathered([tensor] if is_shard(tensor) else []):
        return {name: tensor.detach().to("cpu", copy=True)} if is_writer else {}
