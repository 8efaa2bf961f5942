"""One of several sequence ranks, counted: shares that add up, what it sends, and what two real ranks send and hold."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.sequence_memory import long_group, small_model, small_settings
from tests.support.processes import launch_ranks
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.bench.grid import StepPoint
from vlm_pg.bench.paper.contestants import counted
from vlm_pg.bench.paper.counter import count, fake_mode
from vlm_pg.bench.paper.devices import DEVICES, LINKS
from vlm_pg.bench.paper.fake import fake_policy
from vlm_pg.bench.paper.models import config_of
from vlm_pg.bench.paper.sequence import CountedRank
from vlm_pg.bench.shapes import SIZES
from vlm_pg.cli import main
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.plan.communication import sequence_parallel_bytes

# 32 rows that nobody reads and 64 that are read: the prompt's last one and all of a response but its last token.
PREFIX, RESPONSES, LENGTH = 33, 3, 22
POINT = StepPoint(PREFIX, RESPONSES, LENGTH)
READ_ROWS = 1 + RESPONSES * (LENGTH - 1)
BF16, FP32 = 2, 4


SHAPE = replace(SIZES["small"], layers=2)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """``small`` of two layers."""
    config = config_of("small")
    config.get_text_config().num_hidden_layers = SHAPE.layers
    config.get_text_config().layer_types = ["full_attention"] * SHAPE.layers
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def spec(model: str, checkpointing: bool) -> dict[str, Any]:
    made = {"model": model, "work": "step", "point": POINT.record, "contestant": "grouped", "layers": None}
    made |= {"run": "vlm_pg.bench.training.grouped:whole", "dtype": "bf16", "lora": None, "liger": False}
    return made | {"checkpointing": checkpointing}


@pytest.mark.parametrize(
    "ranks, checkpointing",
    [
        pytest.param(ranks, checkpointing, marks=() if (ranks == 4) == checkpointing else pytest.mark.matrix)
        for ranks in (2, 4)
        for checkpointing in (False, True)
    ],
)
def test_ranks_do_the_whole_work_once_and_send_what_is_planned(model: str, ranks: int, checkpointing: bool) -> None:
    whole = counted(spec(model, checkpointing))
    assert "sent" not in whole["counts"]
    found = [
        counted(spec(model, checkpointing) | {"sequence_ranks": ranks, "sequence_rank": rank}) for rank in range(ranks)
    ]
    # Each row through the layers on one rank, each head on one: nothing is computed twice.
    for kind in ("matmul", "attention"):
        assert sum(one["counts"]["flops"][kind] for one in found) == whole["counts"]["flops"][kind]
    layer = sequence_parallel_bytes(SHAPE, PREFIX + READ_ROWS - 1, ranks, BF16, checkpointing)
    passes = 3 if checkpointing else 2
    # In the last layer only rows that are read ask: the others send no queries and get no outputs.
    heads = 2 * SHAPE.heads * SHAPE.head_dim
    unasked = (PREFIX - 1) // ranks * heads * (ranks - 1) // ranks * BF16
    # Log-probabilities and entropies, padded to the most: the first row predicts the first token of each response.
    targets = READ_ROWS // ranks - 1 + RESPONSES
    for one in found:
        assert one["counts"]["sent"] == {
            "all_to_all": SHAPE.layers * layer - passes * unasked,
            "all_gather": 2 * (ranks - 1) * FP32 * targets,
        }
        # Once before attention and once behind it; values at the end.
        launches = one["counts"]["launches_by_operation"]
        assert launches["all_to_all"] == 2 * passes * SHAPE.layers and launches["all_gather"] == 2
        # A rank waits no more often than the whole.
        assert one["counts"]["waits"] == whole["counts"]["waits"]


def test_one_rank_is_the_whole(tmp_path: Path) -> None:
    point = f"{PREFIX},{RESPONSES},{LENGTH}"
    words = ["bench", "paper", "--models", "small", "--points", point, "--jobs", "1", "--few-layers"]
    plain, ranks, table = tmp_path / "plain.json", tmp_path / "ranks.json", tmp_path / "ranks.md"
    figure = tmp_path / "ranks.svg"
    assert main([*words, "--works", "step", "--contestants", "grouped", "--out", str(plain)]) == 0
    shown = ["--out", str(ranks), "--markdown", str(table), "--figure", str(figure)]
    assert main([*words, "--sequence-ranks", "1", "2", "3", *shown]) == 0
    (whole,), record = json.loads(plain.read_text())["entries"], json.loads(ranks.read_text())
    one, two, three = record["entries"]
    assert {k: v for k, v in one.items() if k != "count_seconds"} == {
        k: v for k, v in whole.items() if k != "count_seconds"
    }
    assert "links" not in json.loads(plain.read_text()) and record["links"].keys() == DEVICES.keys()
    assert (two["sequence_ranks"], two["sequence_rank"]) == (2, 0) and two["counts"]["sent"]["all_to_all"] > 0
    assert "divided over 3 sequence ranks, but over 1, 2, 4" in three["not_counted"]
    for name, link in LINKS.items():
        wire = two["roofline"][name]["kinds"]["wire"]
        assert wire == {"seconds": sum(two["counts"]["sent"].values()) / link.bytes_per_second, "roof": "link"}
        by_kind = sum(kind["seconds"] for kind in two["roofline"][name]["kinds"].values())
        assert two["roofline"][name]["device_seconds"] == pytest.approx(by_kind)
    assert "one of 2 sequence ranks" in table.read_text() and "x one rank" in table.read_text()
    assert "one of 2 sequence ranks" in figure.read_text() and "wire" in figure.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--works", "step", "rollout"], "rollout would not be divided"),
        (["--contestants", "grouped", "transformers-batch"], "transformers-batch would not be divided"),
        (["--contestants", "grouped-chunked"], "grouped-chunked would not be divided"),
    ],
)
def test_only_ours_is_divided(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", "--sequence-ranks", "2", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_processes_that_compute_send_and_hold_as_much(ranks: int) -> None:
    """Real ranks on a CPU, and one of them counted with the kernel that runs there."""
    prefix = 1024
    printed = launch_ranks("tests.numerics.sequence_memory", str(prefix), "True", ranks=ranks)
    real = json.loads(printed.splitlines()[-1])
    peaks, sent = [], []
    for rank in range(ranks):
        fakes = fake_mode()
        policy = fake_policy(small_model, small_settings(True), fakes, CpuFlashKernel())
        with fakes:  # they are there before, as on the real ones
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        sequence = CountedRank(ranks, rank)
        run = partial(backward_in_chunks, policy, [long_group(prefix)], summed, None, sequence=sequence)
        found = count(run, fakes, on_gpu=False)
        peaks.append(found.peak_bytes)
        sent.append(sequence.sent_bytes)
    assert sent == real["sent"]
    assert max(peaks) == pytest.approx(real["peak"], rel=0.1)


def summed(chunk: Any) -> Any:
    return sum(logprobs.sum() for _, logprobs in chunk[0])
