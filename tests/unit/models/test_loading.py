"""Models that cannot be loaded or shared exactly are refused with what to do."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vlm_pg
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import WeightlessPolicy, make_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.weights import not_finite


def test_a_folder_loads_in_the_requested_precision(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    assert vlm_pg.load_policy(folder).dtype == torch.float32
    policy = vlm_pg.load_policy(folder, dtype="bf16")
    assert policy.dtype == torch.bfloat16
    assert policy.kernel.name == "cpu-flash"
    assert not any(p.requires_grad for p in policy.model.model.visual.parameters())


@pytest.mark.parametrize(
    "folder, message",
    [
        ("nowhere", "which is not a folder"),
        ("empty", "No model configuration could be read"),
        ("without weights", "has a config but could not be loaded"),
        ("damaged", "could not be loaded"),
    ],
)
def test_folders_that_are_no_model(folder: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tiny_model().config.save_pretrained(tmp_path / "without weights")
    (save_tiny_model(tmp_path / "damaged") / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=message):
        vlm_pg.load_policy(tmp_path / folder)


def test_missing_weights_are_not_random_ones(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    lacking = sorted(tensors)[20:]
    save_file({name: tensors[name] for name in sorted(tensors)[:20]}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lacks {len(lacking)} of its weights \(.*, \.\.\.\), which would be random"):
        vlm_pg.load_policy(tmp_path)


@pytest.mark.parametrize("value, dtype", [(float("nan"), "fp32"), (float("inf"), "bf16")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float, dtype: str) -> None:
    file = save_tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[5]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"infinities in 1 of its weights \(the first is {name} in model\.safe"):
        vlm_pg.load_policy(tmp_path, dtype=dtype)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize("data", ["[]", "{", "[" * 100_000], ids=["list", "open", "deep"])
def test_odd_files_of_a_model_are_no_traceback(tmp_path: Path, name: str, data: str) -> None:
    (save_tiny_model(tmp_path) / name).write_text(data)
    with pytest.raises(ModelError, match=str(tmp_path)):
        vlm_pg.load_policy(tmp_path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2"])
def test_token_ids_without_embeddings_are_refused(family: str, tmp_path: Path) -> None:
    """Tokens were added, and the embeddings not resized; more embeddings than tokens, as Qwen pads them, are fine."""
    tokenizer = tiny_processor(family) if family == "qwen2" else tiny_processor(family).tokenizer
    processor, size = deepcopy(tiny_processor(family)), len(tokenizer)
    getattr(processor, "tokenizer", processor).add_tokens(["<answer>"])
    tiny_model(family).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    message = rf"token ids up to {size}, the model has embeddings for ids 0 to {size - 1}\..* resize the model's"
    with pytest.raises(ModelError, match=message):
        vlm_pg.load_policy(tmp_path)
    with pytest.raises(ModelError, match=message):
        WeightlessPolicy(ModelSettings(path=str(tmp_path)))
    tiny_model(family, vocab_size=size + 8).save_pretrained(tmp_path)
    assert vlm_pg.load_policy(tmp_path).vocab_size == size + 8


def test_plain_forwards_need_plain_attention() -> None:
    """The model object still works by itself once its own attention is set back; until then it says what to do."""
    policy = make_policy(tiny_model(), tiny_processor())
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"model\.set_attn_implementation\('sdpa'\) for plain forwards"):
        policy.model(input_ids=ids)
    policy.model.set_attn_implementation("sdpa")
    assert policy.model(input_ids=ids).logits.shape == (1, 3, policy.vocab_size)


NAN = float("nan")


class OneBuffer:
    """As DeepSpeed's swapper of weights, with a single buffer and no disk."""

    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self.read: list[str] = []
        self.free = 1

    def swap_in(self, weights: list[Any], async_op: bool) -> None:
        (weight,) = weights
        assert self.free == 1 and not async_op
        self.free, weight.ds_tensor.data = 0, self.parts[weight.ds_id]
        self.read.append(weight.ds_id)

    def remove_partition_and_release_buffers(self, weights: list[Any]) -> None:
        (weight,) = weights
        self.free, weight.ds_tensor.data = 1, torch.zeros(1)

    def weight(self, name: str, part: list[float], elements: int) -> Any:
        weight: Any = torch.nn.Parameter(torch.empty(0))
        weight.ds_id, weight.ds_numel, weight.nvme_swapper = name, elements, self
        weight.ds_tensor = torch.zeros(1)
        weight.ds_tensor.status = SimpleNamespace(name="NOT_AVAILABLE")
        self.parts[name] = torch.tensor(part)
        return weight


@pytest.mark.parametrize(
    ("part", "elements", "found"),
    [([1.0, 2.0], 2, []), ([1.0, NAN], 2, ["a"]), ([NAN, 1.0], 2, ["a"]), ([1.0, NAN], 1, [])],
    ids=["finite", "last", "first", "padding"],
)
def test_each_weight_on_disk_is_read_once_through_one_buffer(
    part: list[float], elements: int, found: list[str]
) -> None:
    disk = OneBuffer()
    weights = {"a": disk.weight("a", part, elements), "b": disk.weight("b", [3.0], 1), "held": torch.tensor([NAN])}
    assert not_finite(weights.items()) == [*found, "held"]
    assert disk.read == ["a", "b"] and disk.free == 1
