"""The roofline by hand: of each kind the slower of computing and moving, kinds summed, launches beside it."""

from __future__ import annotations

import pytest

from vlm_pg.bench.paper.devices import ALL, DEVICES, LINKS, REACHED, Device, Link, device_called
from vlm_pg.bench.paper.record import entry_of
from vlm_pg.bench.paper.roofline import expected_seconds, fits, roofline
from vlm_pg.bench.paper.table import markdown
from vlm_pg.bench.paper.trees import extrapolated, weighted

# 100 FLOPs and 10 bytes a second.
SLOW = Device({"bf16": 100.0}, 10.0, 1000, "by hand")


def _counts(**kinds: tuple[int, int]) -> dict[str, dict[str, int]]:
    return {
        "flops": {kind: flops for kind, (flops, _) in kinds.items()},
        "bytes": {kind: moved for kind, (_, moved) in kinds.items()},
    }


def test_of_each_kind_the_slower_counts() -> None:
    # Products: 5 s of computing, 2 s of moving; element-wise: 3 s of moving.
    found = roofline(_counts(matmul=(500, 20), elementwise=(0, 30)), 7, SLOW, "bf16", 0.5)
    assert found["device_seconds"] == 8.0 and found["launch_seconds"] == 3.5 and found["seconds"] == 8.0
    assert found["kinds"]["matmul"] == {"seconds": 5.0, "roof": "FLOPs"}
    assert found["kinds"]["elementwise"] == {"seconds": 3.0, "roof": "bytes"}
    assert found["roof"] == "FLOPs"


@pytest.mark.parametrize(("moved", "launches", "roof", "seconds"), [(60, 7, "bytes", 11.0), (30, 40, "launches", 20.0)])
def test_which_roof_binds(moved: int, launches: int, roof: str, seconds: float) -> None:
    found = roofline(_counts(matmul=(500, 20), elementwise=(0, moved)), launches, SLOW, "bf16", 0.5)
    assert (found["roof"], found["seconds"]) == (roof, seconds)


def test_expected_are_the_shares_of_the_peaks_that_were_reached() -> None:
    counts = _counts(matmul=(500, 20), attention=(100, 1), elementwise=(0, 30)) | {"launches": 7, "waits": {"a:1": 2}}
    beside = 7 * REACHED.kernel_seconds + 2 * REACHED.wait_seconds
    seconds = 5 / REACHED.matmul + 1 / REACHED.attention + 3 / REACHED.bandwidth + beside
    assert expected_seconds(counts, 7, SLOW, "bf16") == pytest.approx(seconds)
    few_rows = counts | _counts(matmul=(1, 20))
    assert expected_seconds(few_rows, 7, SLOW, "bf16") == pytest.approx(2 / REACHED.weights_bandwidth + beside)
    assert expected_seconds(few_rows, 10**6, SLOW, "bf16") == pytest.approx(10**6 * REACHED.launch_seconds)
    link = Link("by hand", 4.0, "by hand")
    assert expected_seconds(few_rows | {"sent": {"all_gather": 8}}, 7, SLOW, "bf16", link) == pytest.approx(
        2 / REACHED.weights_bandwidth + beside + 2
    )
    shares = (REACHED.matmul, REACHED.attention, REACHED.bandwidth, REACHED.weights_bandwidth)
    assert all(0 < share < 1 for share in shares), "no kernel reaches a peak: the least stays the least"


def test_what_is_sent_is_a_roof_of_its_own() -> None:
    # Products: 5 s; 40 bytes over a link of 4 bytes a second: 10 s, one after the other.
    sent, link = {"sent": {"all_to_all": 30, "all_gather": 10}}, Link("by hand", 4.0, "by hand")
    found = roofline(_counts(matmul=(500, 20)) | sent, 7, SLOW, "bf16", 0.5, link)
    assert (found["seconds"], found["roof"]) == (15.0, "link")
    assert found["kinds"]["wire"] == {"seconds": 10.0, "roof": "link"}
    assert "wire" not in roofline(_counts(matmul=(500, 20)), 7, SLOW, "bf16", 0.5, link)["kinds"]


def test_published_links_are_those_of_one_direction() -> None:
    # By NVIDIA's data sheets GB/s of both: NVLink 600, 900, 900; PCIe 4.0 x16: 16 GT/s in 16 lanes, 128 of 130 bits.
    both = {"A100 80GB SXM": 600, "H100 SXM": 900, "H200": 900, "RTX 4090": 2 * 16 * 16 / 8 * 128 / 130}
    assert {name: pytest.approx(2 * link.bytes_per_second / 1e9, rel=1e-3) for name, link in LINKS.items()} == both
    assert LINKS.keys() == DEVICES.keys()


def test_what_fits() -> None:
    assert fits(600, 400, SLOW) and not fits(600, 401, SLOW)


def test_published_peaks_are_dense_ones() -> None:
    # By NVIDIA's data sheets, in TFLOP/s of bf16 and GB/s; an H100's 1,979 are with sparsity.
    sheets = {"A100 80GB SXM": (312, 2039), "H100 SXM": (989, 3350), "H200": (989, 4800), "RTX 4090": (165, 1008)}
    assert sheets == {
        name: (device.flops_per_second["bf16"] // 1e12, device.bytes_per_second / 1e9)
        for name, device in DEVICES.items()
    }
    assert all(device.source and device.driver_names for device in ALL.values())


def test_a_card_is_known_by_the_whole_name_that_its_driver_gives() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100 SXM",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA H100 NVL": "H100 NVL",
        "NVIDIA H200": "H200",
        "NVIDIA H200 NVL": "H200 NVL",
        "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
        "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
        "A100-SXM4-40GB": "A100 40GB",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
    }
    assert {name: device_called(name) for name in names} == names
    # Cards with other peaks whose names begin or end alike.
    others = ["NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GH200 480GB", "NVIDIA T4"]
    others += ["NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA", ""]
    assert [device_called(name) for name in [*others, None]] == [None] * 8


def test_sums_of_trees() -> None:
    near, far = {"a": 10, "b": {"c": 1.5}}, {"a": 13, "b": {"c": 2, "d": 4}}
    assert weighted([(2, near), (1, far)]) == {"a": 33, "b": {"c": 5, "d": 4}}
    # From 2 and 3 to 6: three steps beyond 3.
    assert extrapolated(near, far, (2, 3), 6) == {"a": 22, "b": {"c": 3.5, "d": 16}}


def _spec(**changes: object) -> dict[str, object]:
    point = {"prefix": 10, "generations": 2, "new_tokens": 4, "groups": 1}
    return {"model": "m", "work": "rollout", "point": point, "contestant": "ours", "dtype": "bf16"} | changes


def test_what_a_graph_replays_is_one_launch() -> None:
    counts = _counts(matmul=(0, 0), elementwise=(0, 0)) | {"launches": 100, "waits": {"a.py:1": 3}}
    middle = counts | {"launches": 30}
    found = {"counts": counts, "parts": {"steps": counts}, "middle": middle, "weights_bytes": 1, "peak_bytes": 1}
    # Three steps, each with 25 launches in a graph and 5 beside: 100 - 75 + 3, and 5 + 1 in the middle one.
    entry = entry_of(_spec(), found | {"captured_launches": 75, "replays": {"H200": 3}}, 1.0)
    assert entry["roofline"]["H200"]["launch_seconds"] == 28
    assert entry["middle_roofline"]["H200"]["launch_seconds"] == 6
    assert entry["roofline"]["RTX 4090"]["launch_seconds"] == 100
    assert entry["middle_roofline"]["RTX 4090"]["launch_seconds"] == 30
    assert entry_of(_spec(), found, 1.0)["roofline"]["H200"]["launch_seconds"] == 100
    # Two steps that the host launches: 30 kernels each, in place of what the device takes for them.
    graphs = {"captured_launches": 75, "replays": {"H200": 3}}
    busy = {**found, "middle": middle | {"waits": {}}}
    longer, usual = (entry_of(_spec(), busy | graphs | {"eager_steps": n}, 1.0)["roofline"] for n in (2, 0))
    more = longer["H200"]["expected_seconds"] - usual["H200"]["expected_seconds"]
    assert more == pytest.approx(2 * 30 * (REACHED.launch_seconds - REACHED.kernel_seconds))
    assert longer["RTX 4090"] == usual["RTX 4090"], "nothing is recorded there"


def test_the_table_says_why_something_is_not_counted() -> None:
    entry = entry_of(_spec(contestant="transformers-continuous"), {"not_counted": "a thread of its own"}, 1.0)
    settings = {"dtype": "bf16", "checkpointing": False, "lora": None, "liger": False, "launch_seconds": 5e-6}
    words = markdown({"settings": settings, "devices": {"H200": {}}, "entries": [entry]})
    assert "Counted, not measured" in words and "transformers-continuous" in words and "a thread of its own" in words
