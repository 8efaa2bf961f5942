"""tensorboard gets what metrics.jsonl has, rollouts as text that is no markup, and no process group."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.multiprocessing import start_processes

from tests.support.tracker_files import events, expected_scalars, scalars
from tests.unit.observe.builders import CONFIG, make_group, read_lines
from vlm_pg.observe.logs import MetricsLog, RolloutsLog
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.settings import ObserveSettings
from vlm_pg.observe.trackers import Trackers
from vlm_pg.types import RolloutGroup

pytest.importorskip("tensorboard")
# Odd numbers, a count, and values far from 1.
VALUES = {"reward": 1 / 3, "kl": 1e-9, "groups": 12, "tokens_per_second": 123456.789, "seconds/rollout": 0.1}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", resume=False)


def log_steps(
    folder: RunFolder,
    steps: range,
    resume_step: int | None = None,
    factor: float = 1.0,
    groups: Sequence[RolloutGroup] = (),
    **settings: Any,
) -> list[str]:
    """Log as a run does; returns all warnings."""
    warnings: list[str] = []
    with (
        MetricsLog(folder, resume_step) as metrics,
        RolloutsLog(folder, groups_per_step=99, resume_step=resume_step) as rollouts,
        Trackers(ObserveSettings(**settings), folder, "tiny", resume_step, print, warnings.append) as trackers,
    ):
        for step in steps:
            metrics.write(step, {key: value * factor * step for key, value in VALUES.items()} | {"none": None})
            rollouts.write(step, groups)
            trackers.step_done(step)
    return warnings


def test_scalars_are_those_of_metrics_jsonl_over_a_resume_and_settings_are_there(folder: RunFolder) -> None:
    """Steps after the resumed one are superseded."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    folder.write_config(CONFIG)
    assert log_steps(folder, range(1, 6)) == []
    assert len(list(folder.tensorboard.iterdir())) == 1  # no folder of a further run beside it
    assert log_steps(folder, range(3, 8), resume_step=2, factor=-2.0) == []
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 2, 3, 4, 5, 6, 7]
    assert scalars(folder) == expected_scalars(folder) and len(scalars(folder)) == len(VALUES)
    content = events(folder).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert {key: value.string_value or value.number_value for key, value in hparams.items()} == {
        "run.name": "tiny",
        "model.path": "assets/tiny",
        "data.train": "data/train.jsonl",
        "training.steps": 4,
    }


HOSTILE = [
    "![](http://127.0.0.1/pixel.png) <img src=x onerror=alert(1)> [a](javascript:alert(1)) <script>alert(1)</script>",
    *(
        "before" + end + "# heading <b>x</b>"
        for end in ("\n", "\r", "\r\n", "\n\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028")
    ),
    "\n```\n</code></pre><h1>out</h1>\n\n- item\n\n1. one\n",
    "\n\n\n\t| a | b |\n|---|---|\n| <i>1</i> | 2 |",
    "\x02klzzwxh:0000\x03 &lt;b&gt; <https://127.0.0.1>",
]


def test_what_a_model_writes_is_never_markup(folder: RunFolder) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    groups = [
        make_group(f"{number}{text}", (text, f"{text}{text}"), question=f"{text} first?")
        for number, text in enumerate(HOSTILE)
    ]
    assert log_steps(folder, range(1, 2), groups=groups) == []
    found = events(folder)
    assert len(found.Tags()["tensors"]) == len(HOSTILE)
    for tag in found.Tags()["tensors"]:
        (event,) = found.Tensors(tag)
        html = markdown_to_safe_html(event.tensor_proto.string_val[0])
        assert set(re.findall(r"</?([a-zA-Z0-9]+)", html)) == {"pre", "code"} and html.count("<pre>") == 1
        assert "reward 1.100 (accuracy 1.0, format 1.0), advantage +0.700" in html


def test_rollouts_and_frames_come_when_they_are_due(folder: RunFolder) -> None:
    groups = [make_group("a"), make_group("b", frames=0)]
    log_steps(folder, range(1, 5), groups=groups, track_rollouts_every=2)
    found = events(folder)
    assert sorted(found.Tags()["tensors"]) == ["rollouts/1/text_summary", "rollouts/2/text_summary"]
    assert [event.step for event in found.Tensors("rollouts/1/text_summary")] == [1, 2, 4]
    (tag,) = found.Tags()["images"]
    assert [event.step for event in found.Images(tag)] == [1, 2, 4]
    (strip,) = folder.thumbnails.iterdir()
    with Image.open(strip) as picture:
        assert (found.Images(tag)[0].width, found.Images(tag)[0].height) == picture.size


def test_no_tracker_writes_nothing(folder: RunFolder) -> None:
    log_steps(folder, range(1, 3), groups=[make_group()], trackers=())
    assert not folder.tensorboard.exists() and not folder.trackers.exists()


def _rank(rank: int, folder: str) -> None:
    from accelerate.state import PartialState

    # What torchrun sets, and what would make accelerate form a group of its own.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_DEEPSPEED="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    PartialState._reset_state()
    run = RunFolder(Path(folder) / "run")
    if rank == 0:  # before there is a group, too
        log_steps(run, range(1, 2))
    assert not dist.is_initialized()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    if rank == 0:
        log_steps(run, range(2, 4), resume_step=1)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0 and dist.group.WORLD is group and PartialState._shared_state == {}
    dist.destroy_process_group()


def test_only_rank_0_writes_and_no_group_is_touched(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    assert scalars(folder) == expected_scalars(folder) and [
        event.step for event in events(folder).Scalars("train/kl")
    ] == [1, 2, 3]
    assert len(list(folder.tensorboard.iterdir())) == 2  # one event file for each start
