"""What is counted of decoding is what a GPU is asked to do, for every family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.groups import tiny_policy
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.bench.paper.generation import _Ours, decoding_as_on_cuda
from vlm_pg.rollout import engine
from vlm_pg.rollout.decoders import decoder_for
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.ragged import RaggedDecoder
from vlm_pg.rollout.settings import RolloutSettings


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
