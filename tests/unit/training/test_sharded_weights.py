"""Weights saved one by one are the files of ``save_pretrained``; which of a rank's elements must be finite."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import Chunk, WeightConverter

from tests.support.tiny import tiny_model
from vlm_pg.distributed import RankLayout
from vlm_pg.models.sharded_weights import save_sharded
from vlm_pg.models.weights import not_finite


def gathered(weights: Any) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.mark.parametrize(
    "joined, tied, shard_bytes",
    [(False, True, 30_000), (False, False, 10**9), (True, False, 30_000), (True, True, 10**9)],
    ids=["several files", "one file", "joined tensors", "joined tensors in one file"],
)
def test_the_files_are_those_of_save_pretrained(joined: bool, tied: bool, shard_bytes: int, tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    if joined:
        parts = [f"mlp.{name}_proj.weight" for name in ("gate", "up")]
        model._weight_conversions = [
            WeightConverter(source_patterns="mlp.gate_up.weight", target_patterns=parts, operations=[Chunk(dim=0)])
        ]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    model.save_pretrained(theirs, max_shard_size=shard_bytes)
    ours.mkdir()
    save_sharded(model, ours, gathered, is_writer=True, shard_bytes=shard_bytes)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    names: set[str] = set()
    for file in theirs.iterdir():
        if file.suffix == ".json":
            assert (ours / file.name).read_bytes() == file.read_bytes(), file.name
            continue
        found, expected = load_file(ours / file.name), load_file(file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        names |= expected.keys()
    assert any("mlp.gate_up.weight" in name for name in names) == joined
    assert ("lm_head.weight" in names) != tied


def test_a_rank_that_does_not_write_leaves_nothing(tmp_path: Path) -> None:
    save_sharded(tiny_model("qwen2"), tmp_path, gathered, is_writer=False, shard_bytes=30_000)
    assert not list(tmp_path.iterdir())


def test_padding_behind_the_last_rank_s_part_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 elements the second of two ranks has one."""
    weight: Any = torch.nn.Parameter(torch.empty(0))
    weight.ds_id, weight.ds_numel, weight.ds_tensor = 0, 3, torch.tensor([1.0, torch.nan])
    weight.ds_tensor.status = SimpleNamespace(name="AVAILABLE")
    for rank, found in ((1, []), (0, ["w"])):
        monkeypatch.setattr(RankLayout, "here", lambda rank=rank: RankLayout(rank, 2))
        assert not_finite([("w", weight)]) == found
    monkeypatch.setattr(RankLayout, "here", lambda: RankLayout(1, 2))
    weight.ds_tensor[0] = torch.nan
    assert not_finite([("w", weight)]) == ["w"]
