"""Counts and speeds by hand."""

from __future__ import annotations

import pytest

from scripts.bench.gpu_check.counted import ALL_DEVICES, device_called
from scripts.bench.gpu_check.page import rows

# Qwen2.5-VL-7B's language model, counted by hand. Queries and output 3584 x 3584, keys and values 3584 x 512 each,
# three of 3584 x 18944 for the MLP; 28 layers; the head.
LAYER = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
LINEAR = 28 * LAYER
HEAD = 3584 * 152064


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
    figures["settings"] = {"model": "7b", "dtype": "fp32"}
    assert rows(figures, "NVIDIA H100 80GB HBM3")[0]["flops_share"] == pytest.approx(flops / 2.0 / 67e12, rel=1e-9)


def test_published_peaks_are_dense_ones() -> None:
    # By NVIDIA's data sheets, in TFLOP/s of bf16 and GB/s; an H100's 1,979 are with sparsity.
    sheets = {"A100 80GB SXM": (312, 2039), "H100 SXM": (989, 3350), "H200": (989, 4800), "RTX 4090": (165, 1008)}
    found = {name: (d.flops_per_second[2] // 1e12, d.bytes_per_second / 1e9) for name, d in ALL_DEVICES.items()}
    assert {name: found[name] for name in sheets} == sheets


def test_a_card_is_known_by_the_whole_name_that_its_driver_gives() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100 SXM",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA H200": "H200",
        "NVIDIA H200 NVL": "H200 NVL",
        "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
        "A100-SXM4-40GB": "A100 40GB",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
    }
    assert {name: device_called(name) for name in names} == names
    # Cards with other peaks whose names begin or end alike.
    others = [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA",
        "",
        None,
    ]
    assert [device_called(name) for name in others] == [None] * len(others)
