"""Counts and speeds by hand, and what was counted beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_pg.bench.grid import RolloutPoint
from vlm_pg.bench.shapes import SIZES
from vlm_pg.gpu_check.counted import counted_entries, read_counted
from vlm_pg.gpu_check.page import render
from vlm_pg.gpu_check.speeds import peak_of, read_once_bytes, rows

# Qwen2.5-VL-7B's language model, counted by hand. Queries and output 3584 x 3584, keys and values 3584 x 512 each,
# three of 3584 x 18944 for the MLP; 28 layers; the head.
LAYER = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
LINEAR = 28 * LAYER
HEAD = 3584 * 152064


def test_the_peak_is_that_of_the_card() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
        "NVIDIA H100 PCIe": (756e12, 2.0e12),
        "NVIDIA H200": (989e12, 4.8e12),
        "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
        "NVIDIA A100-SXM4-40GB": (312e12, 1.555e12),
        "NVIDIA GeForce RTX 4090": (165.2e12, 1.008e12),
    }
    assert {name: (peak.flops, peak.bytes) for name in names if (peak := peak_of(name))} == names
    assert peak_of("NVIDIA T4") is None and peak_of(None) is None


def test_what_one_decoded_token_must_read() -> None:
    # Weights once in bf16; keys and values of 4,096 prompt tokens once and of 8 times half of 512.
    keys = (4096 + 8 * 256) * 28 * 2 * 4 * 128
    assert read_once_bytes(SIZES["7b"], RolloutPoint(4096, 8, 512)) == pytest.approx(2 * (LINEAR + HEAD + keys))


def test_model_flop_utilisation_leaves_recomputation_out() -> None:
    entry = {"median_seconds": 2.0, "peak_bytes": 2**30}
    gain = {"speedup": 3.0, "bounds": {"tokens": 4.0, "flops": 3.5}}
    point = {
        "prefix": 4096, "generations": 8, "response": 512,
        "contestants": {"grouped": entry, "transformers-batch": entry | {"median_seconds": 6.0, "grouped_gain": gain}},
    }  # fmt: skip
    figures = {"measurement": "step", "settings": {"model": "7b", "checkpointing": True}, "points": [point]}
    ours, theirs = rows(figures, "NVIDIA H100 80GB HBM3")
    # Forward and backward: three times two operations for each weight and token. Last tokens predict nothing.
    tokens = 4096 + 8 * 511
    pairs = 4096 * 4097 // 2 + 8 * (511 * 4096 + 511 * 512 // 2)
    flops = 3 * (2 * LINEAR * tokens + 28 * 4 * 3584 * pairs + 2 * HEAD * 8 * 512)
    assert ours["tflops"] == pytest.approx(flops / 2.0 / 1e12, rel=1e-9)
    assert ours["flops_share"] == pytest.approx(flops / 2.0 / 989e12, rel=1e-9)
    assert theirs["share_of_token_bound"] == 0.75 and ours["ours_faster"] is None
    assert rows(figures, None)[0]["flops_share"] is None


def test_decoding_beside_the_least_time() -> None:
    entry = {
        "median_seconds": 8.0, "tokens_per_second": 512.0, "first_token_seconds": 1.0,
        "decode_seconds_per_token": 0.0137, "peak_bytes": None,
    }  # fmt: skip
    point = {"prefix": 4096, "generations": 8, "new_tokens": 512, "groups": 1, "contestants": {"ours": entry}}
    (row,) = rows({"measurement": "rollout", "settings": {"model": "7b"}, "points": [point]}, "NVIDIA H200")
    least = read_once_bytes(SIZES["7b"], RolloutPoint(4096, 8, 512)) / 4.8e12
    assert row["least_decode_seconds"] == least and row["times_least"] == pytest.approx(0.0137 / least)


PLACE = {"prefix": 64, "generations": 2, "response": 8}
MEASURED = {
    "measurement": "step",
    "settings": {"model": "7b"},
    "points": [{**PLACE, "contestants": {"grouped": {"median_seconds": 0.5, "peak_bytes": 9}}, "failed": {}}],
}


@pytest.mark.parametrize(
    "counted",
    [
        [{"model": "7b", **PLACE, "contestants": {"grouped": {"flops": 7.0, "launches": 3}, "other": {"flops": 1.0}}}],
        {"models": {
            "Qwen2.5-VL-7B": {"points": [{**PLACE, "all": [{"contestant": "grouped", "flops": 7.0, "launches": 3}]}]},
            "Qwen3-VL-8B": {"points": [{**PLACE, "all": [{"contestant": "grouped", "flops": 8.0}]}]}}},
        {"rows": [{"of": PLACE, **PLACE, "contestant": "grouped", "measurement": "step", "flops": 7.0, "launches": 3},
                  {**PLACE, "prefix": 65, "contestant": "grouped", "flops": 9.0},
                  {"contestant": "grouped", "flops": 10.0}]},
    ],
    ids=["by contestant", "by model", "rows"],
)  # fmt: skip
def test_counted_figures_find_the_measured_ones_of_the_same_point(tmp_path: Path, counted: object) -> None:
    (tmp_path / "paper.json").write_text(json.dumps(counted))
    (tmp_path / "step-7b.json").write_text(json.dumps(MEASURED))
    reading = read_counted(tmp_path / "paper.json", tmp_path)
    (row,) = reading.figures["beside"]
    assert row["counted"] == {"flops": 7.0, "launches": 3} and row["measured"] == {"seconds": 0.5, "peak_bytes": 9}
    assert row["point"] == PLACE and not reading.remarks


def test_counted_figures_of_other_points_are_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "paper.json").write_text(json.dumps({"rows": [{"contestant": "grouped", "prefix": 5, "flops": 1.0}]}))
    (tmp_path / "step-7b.json").write_text(json.dumps(MEASURED))
    assert "no counted figure is of a point" in read_counted(tmp_path / "paper.json", tmp_path).remarks[0]
    assert read_counted(tmp_path / "none.json", tmp_path).problem == "it wrote no result"
    assert list(counted_entries("no mapping")) == []


def test_the_page_shows_every_kind_of_figure() -> None:
    bench = {**MEASURED, "machine": {}}
    kernel = {"kernel": "cuda-flash", "heads": [28, 4, 128], "worst": 0.002}
    training = {
        "steps": [dict.fromkeys(("step", "loss", "grad_norm", "reward", "step_seconds", "tokens_per_second"), 1.5)],
        "accuracy_before": {"seen": 0.25}, "accuracy_after": {"seen": 0.5}, "attention_kernel": "x", "seconds": {},
    }  # fmt: skip
    whole = {"frames": 64, "prompt_tokens": 4108, "peak_bytes": 2**34, "seconds": {"update": 2.0}, "failed": ""}
    beside = [{"measurement": "step", "model": "7b", "contestant": "grouped", "point": PLACE, "for": "H100",
               "measured": {"seconds": 0.5, "peak_bytes": 2**30}, "counted": {"roofline_seconds": 0.4}}]  # fmt: skip
    named = {
        "environment": {"device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}},
        "tests": {"counts": {"passed": 3}, "failed": {"test_a": "bad"}},
        "kernels": {"checks": [kernel, kernel | {"failed": "differs"}]},
        "training-fp32": training,
        "step-7b": bench,
        "grpo-step-64": {"whole_step": whole},
        "counted": {"beside": beside},
    }
    stages = [
        {"name": name, "title": name, "status": "ok", "seconds": 1.0, "limit_seconds": 2.0, "problem": "",
         "remarks": [], "commands": ["x"], "log": "x", "end_of_log": [], "figures": figures}
        for name, figures in named.items()
    ]  # fmt: skip
    machine = {"system": "s", "cores": 1, "memory_gib": 1, "python": "3", "gpus": [], "commit": "abc", "packages": {}}
    page = render({"when": "now", "commands": ["c"], "device": "cuda", "machine": machine, "stages": stages})
    for words in (
        "vlm_pg on NVIDIA H100",
        "3 passed",
        "test_a",
        "differs",
        "50.0",
        "16.00 GiB",
        "roofline_seconds 0.400",
    ):
        assert words in page, words
    assert "nothing here says anything" not in page
