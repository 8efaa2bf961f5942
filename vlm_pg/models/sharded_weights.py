"""Sharded weights (ZeRO-3), gathered one by one: saved as ``save_pretrained`` does, or by their names in its files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from vlm_pg.models.lora import adapter_parameters, has_adapter
from vlm_pg.models.weights import is_shard, num_elements, whole_shape

WEIGHTS, INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
Gathered = Callable[[Iterable[torch.nn.Parameter]], AbstractContextManager[None]]


def save_sharded(model: Any, folder: Path, gathered: Gathered, is_writer: bool, shard_bytes: int) -> None:
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
    converter, order, files, sizes, index = plan
    tensors: dict[str, torch.Tensor] = {}
    for name in order:
        tensor, whole = model.get_parameter_or_buffer(name), {}
        with gathered([tensor] if is_shard(tensor) else []):
            if is_writer:
                whole = {name: tensor.detach().to("cpu", copy=True)}
        for key, tensor in converter.to_stored(whole).items() if is_writer else ():
            tensors[key] = tensor.contiguous()
            file = files[key]
            if len(of_file := [key for key in tensors if files[key] == file]) == sizes[file]:
                save_file({key: tensors.pop(key) for key in of_file}, folder / file, metadata={"format": "pt"})
    if is_writer and len(sizes) > 1:
        (folder / INDEX).write_text(index)


def stored_tensors(model: Any, gathered: Gathered) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``save_pretrained``'s files by name, whole until the next is taken; taken on every rank."""
    converter, by_weight, everything = _stored(model)
    for names in [list(by_weight)] if everything is None else [[name] for name in by_weight]:
        weights = {name: model.get_parameter_or_buffer(name) for name in names}
        with gathered([weight for weight in weights.values() if is_shard(weight)]):
            yield from converter.to_stored({name: weight.detach() for name, weight in weights.items()}).items()


def _stored(model: Any) -> tuple[_Converter, dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]:
    """Tensors in files, without data.

    Returns:
        Converter; tensors by the weight they are made of; all of them, None if one is made of several weights.
    """
    empty = _without_data(model)
    converter = _Converter(model, empty)
    by_weight = {name: _contiguous(converter.to_stored({name: tensor})) for name, tensor in empty.items()}
    everything = _contiguous(converter.to_stored(empty))
    one_by_one = {key: tensor.shape for tensors in by_weight.values() for key, tensor in tensors.items()}
    same = one_by_one == {key: tensor.shape for key, tensor in everything.items()}
    return converter, by_weight, everything if same else None


def _plan(model: Any, shard_bytes: int) -> tuple[_Converter, list[str], dict[str, str], Counter[str], str] | None:
    """The files without any data; None if a tensor of them is made of several weights.

    Returns:
        Converter; weights by their tensors in the files; file of each tensor; tensors of each file; the index.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    converter, by_weight, everything = _stored(model)
    if everything is None:
        return None
    split = split_torch_state_dict_into_shards(everything, filename_pattern=WEIGHTS, max_shard_size=shard_bytes)
    total = {"total_parameters": sum(map(num_elements, model.parameters())), **split.metadata}
    index = json.dumps({"metadata": total, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True) + "\n"
    position = {key: number for number, key in enumerate(everything)}
    order = sorted(by_weight, key=lambda name: min(position[key] for key in by_weight[name]))
    files = split.tensor_to_filename
    return converter, order, files, Counter(files.values()), index


def _without_data(model: Any) -> dict[str, torch.Tensor]:
    """Weights and buffers without data; of tied weights the one that transformers saves."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    empty = {
        name: torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in (model._keys_to_ignore_on_save or ())
    }
    return remove_tied_weights_from_state_dict(empty, model)


class _Converter:
    """Converts weights to names and shapes of the files the model was read from.

    Stands in for the model, which conversions ask for shapes: gathered one by one, most weights have none.
    """

    def __init__(self, model: Any, whole: Mapping[str, torch.Tensor]):
        self._model, self._whole = model, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._whole[name]

    def to_stored(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(cast(Any, self), dict(tensors))


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies: parts of a weight would count as the whole of it."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
