"""Counts of ``scripts.bench.paper`` beside measured figures: a real file of it, measured figures by hand; the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.gpu_check.counted import device_called, read_counted
from scripts.bench.gpu_check.page import render, rows
from scripts.bench.gpu_check.reading import Reading
from scripts.bench.gpu_check.stages import Measurement, paper_commands
from scripts.bench.paper import main as bench_paper

pytestmark = pytest.mark.usefixtures("thawed")

STEP = {"prefix": 64, "generations": 2, "response": 8}
ROLLOUT = {"prefix": 64, "generations": 2, "new_tokens": 4, "groups": 1}
MEASURED = [
    Measurement("step", "small", "64,2,8", ("grouped",)),
    Measurement("rollout", "small", "64,2,4", ("ours", "transformers-generate")),
]


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Counted by the command of the stage."""
    (command,) = paper_commands(tmp_path_factory.mktemp("paper"), MEASURED, "cpu")
    assert bench_paper(command[command.index("scripts.bench.paper") + 1 :]) == 0
    found: dict[str, Any] = json.loads(Path(command[-1]).read_text())
    return found


def measured(kind: str, point: dict[str, int], contestant: str, figures: dict[str, Any], **settings: Any) -> Any:
    settings = {"model": "small", "dtype": "fp32", "checkpointing": False, "ragged": False} | settings
    points = [{**point, "contestants": {contestant: figures}, "failed": {}}]
    return {"measurement": kind, "settings": settings, "points": points, "skipped": []}


def read(folder: Path, paper: Any, gpu: str | None, **files: Any) -> Reading:
    device = {"type": "cuda", "name": gpu} if gpu else {"type": "cpu"}
    for name, data in {"environment": {"device": device}, "paper-small": paper, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return read_counted([folder / "paper-small.json"], folder)


def rows_of(reading: Reading) -> dict[str, dict[str, Any]]:
    return {row["contestant"]: row for row in reading.figures["beside"]}


def test_measured_figures_stand_beside_those_that_were_counted(tmp_path: Path, paper: dict[str, Any]) -> None:
    step, ours, _ = paper["entries"]
    least = step["least"]["H100 SXM"]["seconds"]
    figures = {"median_seconds": 4 * least, "peak_bytes": 2 * step["peak_bytes"]}
    decoded = ours["decode_step"]["least"]["H100 SXM"]["seconds"]
    generated = {"median_seconds": 1.0, "peak_bytes": None, "decode_seconds_per_token": 3 * decoded}
    reading = read(
        tmp_path, paper, "NVIDIA H100 80GB HBM3",
        step=measured("step", STEP, "grouped", figures), rollout=measured("rollout", ROLLOUT, "ours", generated),
    )  # fmt: skip
    found = rows_of(reading)
    assert reading.problem == "" and reading.figures["device"] == "H100 SXM"
    row = found["grouped"]
    assert row["point"] == STEP and row["measured"]["seconds"] == 4 * least
    assert row["times_least"] == pytest.approx(4) and row["peak_share"] == pytest.approx(2)
    assert set(row["counted"]["least"]) == {"A100 80GB SXM", "H100 SXM", "H200", "RTX 4090"}
    assert row["counted"]["least"]["H100 SXM"] == {"seconds": least, "roof": step["least"]["H100 SXM"]["roof"]}
    assert row["counted"]["peak_bytes"] == step["peak_bytes"]
    # By hand: two operations for each weight and token of the MLPs alone, forward and backward.
    assert row["counted"]["flops"] > 3 * 2 * 4 * 3 * 256 * 704 * (64 + 2 * 7)
    assert found["ours"]["decode_times_least"] == pytest.approx(3) and found["ours"]["peak_share"] is None
    (remark,) = reading.remarks
    assert remark.startswith("not counted: small, rollout (64, 2, 4, 1), transformers-generate: its steps are not")


@pytest.mark.parametrize("gpu, remark", [(None, None), ("NVIDIA T4", "no published peaks of NVIDIA T4")])
def test_without_known_peaks_nothing_is_divided(tmp_path: Path, paper: Any, gpu: str | None, remark: Any) -> None:
    figures = {"median_seconds": 2.0, "peak_bytes": paper["entries"][0]["peak_bytes"]}
    reading = read(tmp_path, paper, gpu, step=measured("step", STEP, "grouped", figures))
    row = rows_of(reading)["grouped"]
    assert row["times_least"] is None and row["peak_share"] == 1.0 and row["measured"]["seconds"] == 2.0
    assert len(row["counted"]["least"]) == 4
    assert any(words.startswith(remark) for words in reading.remarks) if remark else len(reading.remarks) == 1


@pytest.mark.parametrize(
    "point, settings", [({**STEP, "prefix": 65}, {}), (STEP, {"dtype": "bf16"}), (STEP, {"ragged": True})]
)
def test_what_was_measured_otherwise_is_not_taken_for_it(
    tmp_path: Path, paper: Any, point: dict[str, int], settings: dict[str, Any]
) -> None:
    files = {"step": measured("step", point, "grouped", {"median_seconds": 2.0}, **settings)}
    row = rows_of(read(tmp_path, paper, None, **files))["grouped"]
    assert row["measured"] is None and row["not_measured"] == "not measured"


def test_why_something_was_not_measured_or_read(tmp_path: Path, paper: Any) -> None:
    assert read_counted([tmp_path / "none.json"], tmp_path).problem == "it wrote no result"
    assert read(tmp_path, {"format": 1, "entries": []}, None).problem == "a file has format 1, not 2"
    (tmp_path / "read.json").write_text('{"format": 2}')
    files = [tmp_path / "read.json", tmp_path / "none.json"]
    assert read_counted(files, tmp_path).problem == "1 of 2 files can be read"
    fused = measured("step", STEP, "grouped", {"median_seconds": 2.0, "liger": ["rms_norm"]})
    row = rows_of(read(tmp_path, paper, None, a=fused))["grouped"]
    assert row["measured"] is None and row["not_measured"] == "measured with liger-kernel, counted otherwise"
    data = measured("step", STEP, "other", {"median_seconds": 2.0})
    data["points"][0]["failed"] = {"grouped": "out of memory"}
    skipped = measured("rollout", {**ROLLOUT, "prefix": 9}, "ours", {"median_seconds": 2.0})
    skipped["skipped"] = [{**ROLLOUT, "contestant": "ours", "reason": "expected to need 99 GiB"}]
    found = rows_of(read(tmp_path, paper, None, a=data, b=skipped))
    assert found["grouped"]["not_measured"] == "out of memory"
    assert found["ours"]["not_measured"] == "expected to need 99 GiB"


def test_the_page_shows_every_kind_of_figure(tmp_path: Path, paper: Any) -> None:
    bench = measured("step", STEP, "grouped", {"median_seconds": 0.5, "peak_bytes": 2**31})
    kernel = {"kernel": "cuda-flash", "heads": [28, 4, 128], "worst": 0.002}
    training = {
        "steps": [dict.fromkeys(("step", "loss", "grad_norm", "reward", "step_seconds", "tokens_per_second"), 1.5)],
        "accuracy_before": {"seen": 0.25}, "accuracy_after": {"seen": 0.5}, "attention_kernel": "x", "seconds": {},
    }  # fmt: skip
    whole = {"frames": 64, "prompt_tokens": 4108, "peak_bytes": 2**34, "seconds": {"update": 2.0}, "failed": ""}
    decoded = {"median_seconds": 0.5, "decode_seconds_per_token": 0.012}
    files = {"step": bench, "rollout": measured("rollout", ROLLOUT, "ours", decoded)}
    counted = read(tmp_path, paper, "NVIDIA H100 80GB HBM3", **files).figures
    # Numbers that the page is searched for.
    (row,) = (row for row in counted["beside"] if row["contestant"] == "grouped")
    row["times_least"], row["peak_share"], row["counted"]["peak_bytes"] = 3.21, 1.09, 5 * 2**30
    row["counted"]["least"]["H100 SXM"] = {"seconds": 0.0777, "roof": "FLOPs"}
    ours = next(row for row in counted["beside"] if row["contestant"] == "ours")
    ours["counted"]["least_decode"]["H100 SXM"], ours["decode_times_least"] = {"seconds": 0.006, "roof": "bytes"}, 2.0
    named = {
        "environment": {"device": {"type": "cuda", "name": "NVIDIA H100 80GB HBM3"}},
        "tests": {"counts": {"passed": 3}, "failed": {"test_a": "bad"}},
        "kernels": {"checks": [kernel, kernel | {"failed": "differs"}]},
        "training-fp32": training,
        "step-small": bench | {"machine": {}},
        "grpo-step-64": {"whole_step": whole},
        "counted": counted,
    }
    stages = [
        {"name": name, "title": name, "status": "ok", "seconds": 1.0, "limit_seconds": 2.0, "problem": "",
         "remarks": [], "commands": ["x"], "log": "x", "end_of_log": [], "figures": figures}
        for name, figures in named.items()
    ]  # fmt: skip
    machine = {"system": "s", "cores": 1, "memory_gib": 1, "python": "3", "gpus": [], "commit": "abc", "packages": {}}
    result = {"when": "now", "commands": ["c"], "device": "cuda", "machine": machine, "stages": stages}
    page = render(result)
    for words in (
        "vlm_pg on NVIDIA H100", "3 passed", "test_a", "differs", "50.0", "16.00 GiB",
        "0.078 s, FLOPs", ">3.21<", ">1.09<", ">2.00 GiB<", ">5.00 GiB<",
        "not counted: its steps are not",
    ):  # fmt: skip
        assert words in page, words
    # Of a decode step 12 ms, and 6 ms at the least.
    assert ">12<" in page and "6 ms, bytes" in page and ">2<" in page
    assert "nothing here says anything" not in page and "RTX 4090" not in page
    # Where no peaks are known, those of all devices stand there.
    for row in counted["beside"]:
        row["device"] = None
    assert "H100 SXM 0.078 s, FLOPs<br>" in render(result)


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


def test_a_card_is_known_by_the_whole_name_that_its_driver_gives() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100 SXM",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
    }
    assert {name: device_called(name) for name in names} == names
    # Cards with other peaks whose names begin or end alike.
    others = ["NVIDIA GeForce RTX 4090 D", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "", None]
    assert [device_called(name) for name in others] == [None] * len(others)
