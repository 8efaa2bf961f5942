"""What generation books is what it keeps, and a budget too small says how much is needed."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB
from vlm_pg.rollout.cohort import OwnTokens
from vlm_pg.rollout.decoders import DecodeContext
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.memory import TokenCosts, budget_bytes, check_fits
from vlm_pg.rollout.prefill import Prefill
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.rollout.waiting import WaitingPrompts


def size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_costs_are_those_of_the_tensors_kept(family: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(family=family, dtype=dtype)
    prompt = make_case(policy, "text", 0).prompt
    waiting, store = WaitingPrompts([prompt]), PrefixStore()
    store.rearrange((), {0: prompt.num_tokens})
    Prefill(policy, store, waiting.nodes, [prompt], 10_000, lambda: None).run([0], [0])
    costs = TokenCosts.of(policy)
    kept = size(*store.keys.values(), *store.values.values())
    states = [states for of_layer in store.states.values() for states in of_layer.values()]
    assert kept == prompt.num_tokens * costs.per_token
    assert sum(size(one.conv_tail, one.recurrent) for one in states) == costs.per_state
    own = OwnTokens([(0,)] * 3)
    policy.hidden_states(torch.tensor([5, 6, 7]), torch.full((3, 3), 9), DecodeContext(store, [own], policy.kernel))
    grown = size(*(tensor for pair in own._keys_values.values() for tensor in pair))
    assert grown == 3 * 64 * costs.per_token
    assert sum(size(one.conv_tail, one.recurrent) for one in own._states.values()) == 3 * costs.per_state


def test_a_budget_is_stated_or_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget_bytes(RolloutSettings(memory_gb=0.5), torch.device("cpu")) == GIB // 2
    monkeypatch.setattr("vlm_pg.memory.free_host_bytes", lambda: 10 * GIB)
    assert budget_bytes(RolloutSettings(), torch.device("cpu")) == 6 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert budget_bytes(RolloutSettings(), torch.device("cpu")) == 3 * GIB


def test_one_group_beyond_the_budget_says_how_much_is_needed() -> None:
    check_fits(GIB, GIB, "17", RolloutSettings())
    with pytest.raises(ConfigError, match=r"needs 2 GiB .* sample 17\), but generation may take 1 GiB. Raise"):
        check_fits(2 * GIB, GIB, "17", RolloutSettings())
