"""Files of DeepSpeed's kind are read as data; what would run a program is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vlm_pg.errors import CheckpointError, ConfigError
from vlm_pg.training.deepspeed_config import read_deepspeed_config
from vlm_pg.training.safe_load import load_data_only
from vlm_pg.training.settings import TrainingSettings


class Runs:
    """A pickle that makes a file when it is read."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("zip_format", [True, False])
def test_nothing_is_executed(tmp_path: Path, zip_format: bool) -> None:
    file, trace = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "executed"
    torch.save({"module": Runs(trace)}, file, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt holds something other than tensors.*mkdir"):
        load_data_only(str(file))
    assert not trace.exists()
    torch.load(file, weights_only=False)
    assert trace.exists(), "the file must be one that would have run"


def test_what_deepspeed_writes_is_read(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    state = {
        "scaler": LossScaler(2.0),
        "stage": ZeroStageEnum.gradients,
        "place": fragment_address(3, 4),
        "exp_avg": torch.arange(3.0),
    }
    torch.save(state, tmp_path / "state.pt")
    found = load_data_only(str(tmp_path / "state.pt"), map_location="cpu")
    assert found["scaler"].loss_scale == 2.0 and found["stage"] is ZeroStageEnum.gradients
    assert found["place"] == fragment_address(3, 4) and torch.equal(found["exp_avg"], torch.arange(3.0))


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04" + bytes(100), b"\x80\x02."], ids=repr)
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        load_data_only(str(tmp_path / "state.pt"))


@pytest.mark.parametrize(
    "more", [{"checkpoint": {"load_universal": True}}, {"datastates_ckpt": {"host_cache_size": 1}}]
)
def test_formats_that_are_read_otherwise_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | more))
    settings = TrainingSettings(steps=1, engine="deepspeed", deepspeed_config=str(tmp_path / "ds.json"))
    with pytest.raises(ConfigError, match="reads as pickles that may run programs"):
        read_deepspeed_config(settings)
