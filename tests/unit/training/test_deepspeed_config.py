"""The AdamW of a DeepSpeed file, and files that are refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests.support.processes import ROOT
from vlm_pg.errors import ConfigError
from vlm_pg.training.deepspeed_config import make_optimizer, read_deepspeed_config
from vlm_pg.training.settings import TrainingSettings

SETTINGS = TrainingSettings(steps=1, learning_rate=1e-3, betas=(0.8, 0.9), adam_epsilon=1e-6, weight_decay=0.3)
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def optimizer_of(config: dict[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer([{"params": [torch.nn.Parameter(torch.ones(2))]}], SETTINGS, config, torch.device("cpu"))


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3, "offload_optimizer": {"device": "none"}}], ids=str)
def test_states_on_the_device_are_torchs(zero: dict[str, Any]) -> None:
    config = {"zero_optimization": zero}
    optimizer = optimizer_of(config)
    assert type(optimizer) is torch.optim.AdamW
    assert config == {"zero_optimization": zero}
    (group,) = optimizer.param_groups
    chosen = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert chosen == {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}


def test_torchs_adam_updates_offloaded_states_without_a_compiler_or_by_choice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def load(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("Error building extension 'cpu_adam'")

    monkeypatch.setattr(CPUAdamBuilder, "load", load)
    chosen = {"zero_optimization": OFFLOAD, "zero_force_ds_cpu_optimizer": False}
    fallback: dict[str, Any] = {"zero_optimization": OFFLOAD}
    with caplog.at_level(logging.WARNING):
        assert type(optimizer_of(chosen)) is type(optimizer_of(fallback)) is torch.optim.AdamW
    assert fallback["zero_force_ds_cpu_optimizer"] is False
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("vlm_pg")]
    assert "cannot be built (RuntimeError: Error building extension 'cpu_adam')" in line
    assert '"zero_force_ds_cpu_optimizer": false' in line


def zero(stage: int, **section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **section}}


@pytest.mark.parametrize(
    "content, words",
    [
        ([], "holds no JSON object"),
        ({"zero_optimization": 2}, "zero_optimization to 2. Allowed is an object"),
        ({"bf16": 1}, "has ZeRO stage 0"),
        (zero(2, offload_optimizer=True), "that DeepSpeed refuses: .*offload_optimizer.*valid dictionary"),
        (zero(2, cpu_offload=True), "cpu_offload, DeepSpeed's old names for offloading. Set zero_optimization"),
        (zero(2, compute_grad_norm=False), "compute_grad_norm to false, but every step clips"),
        (zero(2, offload_param={"device": "cpu"}), "in stage 2, in which every rank holds all"),
        (zero(1, offload_optimizer={"device": "nvme"}), "device nvme in stage 1. DeepSpeed reaches NVMe in"),
        (zero(3, offload_param={"device": "nvme"}), "device nvme without nvme_path. Set nvme_path to a folder"),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), "the learning rate the run began with"),
        (zero(3, offload_optimizer={"device": "cpu", "super_offload": True}), "checkpoint does not reach"),
        (zero(2, zenflow={"topk_ratio": 0.1}), "zenflow, which keeps optimizer states where a checkpoint"),
        (zero(2, overlap_com=True), "that DeepSpeed refuses: .*overlap_com"),
        (zero(3, offload_param={"device": "disk"}), "that DeepSpeed refuses: .*disk"),
        (zero(2) | {"nebula": {}}, "sets nebula, which is about checkpoints of DeepSpeed's own"),
        (zero(2) | {"gradient_allreduce_op": "sum"}, "sets gradient_allreduce_op, which the training and model"),
    ],
    ids=str,
)
def test_files_that_cannot_be_trained_with_are_refused(content: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(content))
    settings = SETTINGS.model_copy(update={"deepspeed_config": str(file)})
    with pytest.raises(ConfigError, match=re.compile(words, re.DOTALL)):
        read_deepspeed_config(settings)


@pytest.mark.parametrize("builds", [True, False])
def test_every_shipped_file_is_accepted_nvme_where_it_can_be_reached(
    builds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they train is shown by tests/integration/test_layouts.py."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: builds)
    files = sorted((ROOT / "configs/deepspeed").glob("*.json"))
    assert {file.stem for file in files} == {
        *("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")
    }
    for file in files:
        settings = SETTINGS.model_copy(update={"deepspeed_config": str(file)})
        if builds or file.stem != "zero3_nvme":
            assert read_deepspeed_config(settings)["zero_optimization"]["stage"] == int(file.stem[4])
            continue
        with pytest.raises(ConfigError, match=r"async_io cannot be built .* needs a C\+\+ compiler and libaio"):
            read_deepspeed_config(settings)
