"""``scripts.bench.paper`` on small models; counts by hand, and peaks beside measured ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.counting import count, fake_mode, fake_policy
from scripts.bench.models import config_of
from scripts.bench.others import CONTESTANTS
from scripts.bench.paper import counted, least, main
from tests.support.processor import HAS_AVX512
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel, CudaFlashKernel
from vlm_pg.bench import step
from vlm_pg.bench.case import random_model
from vlm_pg.bench.runner import SIZES, run_worker
from vlm_pg.bench.step_case import TrainingCase
from vlm_pg.bench.work import StepPoint, shared_work
from vlm_pg.errors import ConfigError
from vlm_pg.models.settings import ModelSettings
from vlm_pg.plan.devices import Device
from vlm_pg.plan.flops import head_flops, pair_flops, token_flops
from vlm_pg.plan.shape import PUBLISHED
from vlm_pg.processes import resolve

pytestmark = pytest.mark.usefixtures("thawed")

# Model small: hidden 256, 4 layers, 4 query and 2 key-value heads of 64, MLPs of 704, 4,096 tokens.
LAYER_WEIGHTS = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704
LAYERS, HEADS, HEAD_DIM, HEAD_WEIGHTS = 4, 4, 64, 256 * 4096


def paper(out: Path, *words: str) -> dict[str, Any]:
    assert main(["--models", "small", *words, "--out", str(out)]) == 0
    return {entry["contestant"]: entry for entry in json.loads(out.read_text())["entries"]}


def test_an_update_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = paper(tmp_path / "a.json", "--points", "48,2,16", "--contestants", "transformers-batch", "grouped")
    entry, rows, length = found["transformers-batch"], 2, 48 + 16 - 1
    # Forward, and twice as much backward; logits of response tokens alone; pairs below the diagonal, 4 FLOPs a pair and
    # number of a head forward, 10 backward.
    products = 3 * 2 * (rows * length * LAYERS * LAYER_WEIGHTS + rows * 16 * HEAD_WEIGHTS)
    assert entry["counts"]["flops"]["matmul"] == products
    pairs = rows * length * (length + 1) // 2
    assert entry["counts"]["flops"]["attention"] == 14 * pairs * HEADS * HEAD_DIM * LAYERS
    assert entry["weights_bytes"] > 2 * (LAYERS * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS)
    assert found["grouped"]["peak_bytes"] < entry["peak_bytes"] and found["grouped"]["least"]["H200"]["seconds"] > 0
    assert "small, step 48,2,16, grouped: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists"):
        main(["--points", "48,2,16", "--out", str(tmp_path / "a.json")])


def test_decode_steps_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    prefix, rows, new_tokens = 40, 2, 70
    ours = paper(tmp_path / "a.json", "--rollout-points", f"{prefix},{rows},{new_tokens}")["ours"]
    flops, waits = ours["decode_step"]["counts"]["flops"], ours["decode_step"]["counts"]["waits"]
    assert flops["matmul"] == 2 * rows * (LAYERS * LAYER_WEIGHTS + HEAD_WEIGHTS)
    # The prompt and 35 tokens and the new one of each.
    assert flops["attention"] == pytest.approx(4 * rows * (prefix + 36) * HEADS * HEAD_DIM * LAYERS, rel=0.03)
    # The host looks at the device once a token.
    assert sum(waits.values()) == 1


def test_what_is_not_counted_says_why(tmp_path: Path) -> None:
    found = paper(tmp_path / "a.json", "--rollout-points", "16,2,4", "--contestants", "transformers-generate")
    assert "measure it" in found["transformers-generate"]["not_counted"]
    with pytest.raises(ConfigError, match="nothing to count"):
        main(["--models", "small"])
    spec = {"model": "/no/such", "work": "step", "point": StepPoint(16, 2, 4).record, "contestant": "grouped"}
    with pytest.raises(ConfigError, match="is not one of small"):
        counted(spec | {"dtype": "bf16", "checkpointing": False, "liger": False})


def test_of_each_kind_the_slower_counts() -> None:
    # 100 FLOPs and 10 bytes a second. Products: 5 s of computing, 2 s of moving; the others: 3 s of moving.
    device = Device({2: 100.0}, 10.0, 1000, "by hand", ())
    counts = {"flops": {"matmul": 500, "other": 0}, "bytes": {"matmul": 20, "other": 30}}
    assert least(counts, device, "bf16") == {"seconds": 8.0, "roof": "FLOPs"}


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3.5-9B"])
def test_published_configurations_have_the_published_shapes(name: str) -> None:
    text, shape = config_of(name).get_text_config(), PUBLISHED[name]
    assert (text.hidden_size, text.num_hidden_layers) == (shape.hidden, shape.layers)
    assert (text.num_attention_heads, text.num_key_value_heads) == (shape.heads, shape.kv_heads)
    assert (text.intermediate_size, text.vocab_size) == (shape.intermediate, shape.vocab)
    assert (list(getattr(text, "layer_types", None) or [])).count("full_attention") in (0, shape.full_layers)


@pytest.mark.matrix
def test_without_recomputation_nothing_is_done_twice() -> None:
    """An update of 7B that holds all activations and logits makes the least operations: each token once, exact pairs,
    in the last layer only rows that are read, the others' keys and values alone."""
    prefix, count_, response = 4096, 8, 128
    shape, lengths, fakes = SIZES["7b"], [response] * count_, fake_mode()
    settings = ModelSettings(path="7b", dtype="bf16", logits_chunk_mb=100_000)
    policy = fake_policy(lambda: random_model("7b", dtype=torch.bfloat16), settings, fakes, CudaFlashKernel())
    case = TrainingCase.random(policy, prefix, lengths)
    found = count(lambda: case.run(resolve(CONTESTANTS["grouped"].run)), fakes)
    work, layer = shared_work(prefix, lengths), token_flops(shape) / shape.layers
    own, keys = sum(lengths) - count_, 2 * 2 * shape.hidden * shape.key_width
    linear = work.tokens * (shape.layers - 1) * layer + (own + 1) * layer + (prefix - 1) * keys
    pairs = shape.layers * work.pairs - prefix * (prefix - 1) // 2
    least_flops = 3 * linear + 3.5 * pairs * pair_flops(shape) / shape.layers + 3 * sum(lengths) * head_flops(shape)
    assert found.flops.total() == pytest.approx(least_flops, rel=1e-3)


@pytest.mark.matrix
@pytest.mark.skipif(not HAS_AVX512, reason="other kernels put other amounts of memory aside, which no count knows")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
@pytest.mark.parametrize("name", ["grouped", pytest.param("transformers-batch", marks=pytest.mark.matrix)])
def test_counted_peaks_are_those_that_are_measured(name: str) -> None:
    """On a CPU, with the kernel that runs there."""
    point, fakes = StepPoint(768, 4, 96), fake_mode()
    spec = {"model": "small", "dtype": "fp32", "device": "cpu", "checkpointing": False, "threads": 1, "memory": True}
    spec |= {"repeats": 0, "case": step.StepRun.case, "contestants": {name: CONTESTANTS[name].run}, **point.record}
    measured = run_worker(spec, 3600)["contestants"][name]["peak_bytes"]
    policy = fake_policy(lambda: random_model("small"), ModelSettings(path="small"), fakes, CpuFlashKernel())
    case = TrainingCase.random(policy, point.prefix, point.lengths)
    found = count(lambda: case.run(resolve(CONTESTANTS[name].run)), fakes, on_gpu=False).peak_bytes
    assert found == pytest.approx(measured, rel=0.1)
