"""What is counted of decoding is what a GPU is asked to do, for every family."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.support.groups import tiny_policy
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.bench.case import random_model
from vlm_pg.bench.generation.case import GenerationCase
from vlm_pg.bench.generation.counted import counted_rollout
from vlm_pg.bench.generation.ours import together
from vlm_pg.bench.paper import generation
from vlm_pg.bench.paper.contestants import counted
from vlm_pg.bench.paper.counter import count, count_laps, fake_mode
from vlm_pg.bench.paper.fake import fake_policy
from vlm_pg.bench.paper.generation import Generation, _Ours, count_ours, decoding_as_on_cuda
from vlm_pg.models.settings import ModelSettings
from vlm_pg.rollout import cohort, engine, prefix_attention
from vlm_pg.rollout.decoders import decoder_for
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.prefix_attention import pieces_of
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.settings import RolloutSettings

pytestmark = pytest.mark.usefixtures("thawed")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_rollouts_are_rows_of_one_batch_whose_step_is_recorded(family: str) -> None:
    pytest.importorskip("triton")
    policy = tiny_policy(family=family, dtype=torch.bfloat16)
    module: Any = engine
    with decoding_as_on_cuda():
        made = module.decoder_for(policy, PrefixStore(), RolloutSettings())
    assert isinstance(made, RaggedDecoder)
    assert module.decoder_for is decoder_for
    case: Any = SimpleNamespace(policy=policy)
    no_lap: Any = None
    ours = _Ours(None, case, no_lap)
    assert ours.has_graphs
    # By count of torch's grouped products, experts wait on Ampere and Ada.
    everywhere = ["A100 80GB SXM", "H100 SXM", "H200", "RTX 4090"]
    assert ours.found.graphs_on == (["H100 SXM", "H200"] if policy.family.moe else everywhere)
    if policy.family.moe:
        case.policy = tiny_policy(family=family)
        assert not _Ours(None, case, no_lap).has_graphs, "nor in fp32 anywhere"


def test_steps_that_are_left_out_follow_from_those_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, against a count of every step: blocks of own tokens, and what their growth holds for a moment."""
    for module in (cohort, generation):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 3)
    fakes = fake_mode()
    policy = fake_policy(partial(random_model, "small"), ModelSettings(path="small"), fakes, CpuFlashKernel())
    case = GenerationCase.random(policy, 40, 2, 8, 1)
    usual = vars(FakeTensor)["tolist"]
    whole = count(lambda: case.run(together), fakes)
    found: list[Generation] = []
    count_laps(lambda lap: found.append(count_ours(case, lap, as_on_cuda=False)), fakes)
    parts = (found[0].prefill, found[0].steps)
    assert sum(sum(part["flops"].values()) for part in parts) == whole.total_flops
    # What is found is put together at the end, a few numbers of each rollout.
    assert 0 <= whole.total_bytes - sum(sum(part["bytes"].values()) for part in parts) < 4000
    assert found[0].peak_bytes == whole.peak_bytes
    assert vars(FakeTensor)["tolist"] is usual, "for whoever lists fake tensors afterwards"


@pytest.mark.parametrize("beside", [False, True])
def test_long_prompts_are_read_in_pieces_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """Where nobody names a device's multiprocessors, fake tensors of a CPU would be read whole."""
    pytest.importorskip("triton")
    cut: list[tuple[int, dict[int, int]]] = []

    def noted(tokens: Any, queries: Any, kv_heads: int, at_once: Any) -> dict[int, int]:
        cut.append((at_once, pieces_of(tokens, queries, kv_heads, at_once)))
        return cut[-1][1]

    monkeypatch.setattr(prefix_attention, "pieces_of", noted)
    spec: dict[str, Any] = {"model": "small", "dtype": "bf16"}
    point = {"prefix": 4096, "generations": 2, "new_tokens": 2, "groups": 1}
    if beside:
        counted_rollout({**spec, **point, "device": "cuda"}, "ours", None)
    else:
        spec |= {"work": "rollout", "contestant": "ours", "layers": None, "lora": None, "liger": False}
        counted(spec | {"point": point, "checkpointing": False})
    # Two blocks a multiprocessor of 132; the model has 2 key-value heads, so a piece has 256 tokens at the least.
    assert cut and all(at_once == 264 and set(pieces.values()) == {16} for at_once, pieces in cut)
