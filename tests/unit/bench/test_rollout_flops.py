"""What each contestant of ``bench rollout`` computes, by formula, against a count of its operations."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_pg.bench import work
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.flops import forward_done_flops
from vlm_pg.bench.generation.counted import counted_rollout
from vlm_pg.bench.grid import RolloutPoint
from vlm_pg.bench.rollout import CONTESTANTS, OURS
from vlm_pg.bench.shapes import SIZES, LanguageShape
from vlm_pg.bench.work import (
    ForwardDone,
    one_by_one_generation_done,
    repeated_generation_done,
    shared_generation_done,
)
from vlm_pg.processes import resolve
from vlm_pg.rollout.ragged import row_bucket

pytestmark = pytest.mark.usefixtures("thawed")

# By design it computes what masks hide; which depends on whom its scheduler puts together.
WITHOUT_FORMULA = "transformers-continuous"


def counted(name: str, point: RolloutPoint, device: str = "cpu", dtype: str = "fp32") -> dict[str, Any]:
    spec = {"model": "small", "device": device, "dtype": dtype, **point.record}
    return counted_rollout(spec, name, resolve(CONTESTANTS[name].run))


def test_ours_by_hand() -> None:
    # A prompt of 3: of its last row alone the last layer asks, two others give keys and values. Two rollouts read two
    # of their three tokens: behind 3 and themselves, 4 pairs, then 5. Every token comes from a row of logits.
    assert shared_generation_done(RolloutPoint(3, 2, 3)) == ForwardDone(3 + 4, 1 + 4, 2, 6 + 18, 3 + 18, 6)
    # Of four rows two are idle: in two steps each has one own token, and no logits.
    idle = shared_generation_done(RolloutPoint(3, 2, 3), decode_rows=4)
    assert idle == ForwardDone(3 + 8, 1 + 8, 2, 6 + 22, 3 + 22, 6)
    twice = one_by_one_generation_done(RolloutPoint(3, 2, 3, 2))
    assert twice == ForwardDone(14, 10, 4, 48, 42, 12)


def test_generate_by_hand() -> None:
    # Four rows of 3 tokens, 6 pairs each, then two more each.
    assert repeated_generation_done(RolloutPoint(3, 2, 3, 2)) == ForwardDone(20, 20, 0, 4 * 15, 4 * 15, 12)


def test_prompts_that_are_cut_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "PREFILL_TOKENS", 4)
    done = shared_generation_done(RolloutPoint(3, 1, 2, 2))
    # First the first prompt and one token of the second: 6 + 1 pairs, in the last layer 3. Then the second's two
    # others behind it: 2 + 3 pairs, in the last layer too. Last, two rollouts of one token behind 3.
    assert done == ForwardDone(4 + 2 + 2, 1 + 2 + 2, 3, 7 + 5 + 8, 3 + 5 + 8, 4)


def test_operations_of_forward_passes_by_hand() -> None:
    shape = LanguageShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    layer, keys = 2 * (3 * 8 * 16 + 64 + 32 + 32 + 64), 2 * 8 * 4
    linear = 7 * layer + 5 * layer + 2 * 2 * keys
    assert forward_done_flops(shape, ForwardDone(7, 5, 2, 24, 21, 6)) == linear + (24 + 21) * 4 * 8 + 6 * 2 * 8 * 10


# Longer than a block of own tokens, two prompts; and a prompt that takes two passes.
GROUPS, LONG = RolloutPoint(200, 3, 70, 2), RolloutPoint(20_000, 2, 3)


@pytest.mark.parametrize(
    "name,point", [*((name, GROUPS) for name in CONTESTANTS if name != WITHOUT_FORMULA), (OURS, LONG)]
)
def test_formula_is_what_is_counted(name: str, point: RolloutPoint) -> None:
    done = CONTESTANTS[name].done
    assert done is not None
    expected = forward_done_flops(SIZES["small"], done(point))
    assert counted(name, point)["flops"] == pytest.approx(expected, rel=1e-4)


def test_formula_with_the_idle_rows_of_a_gpu() -> None:
    assert row_bucket(GROUPS.rollouts) == GROUPS.rollouts + 2
    expected = forward_done_flops(SIZES["small"], shared_generation_done(GROUPS, row_bucket(GROUPS.rollouts)))
    assert counted(OURS, GROUPS, "cuda", "bf16")["flops"] == pytest.approx(expected, rel=1e-4)


def test_continuous_batching_shares_prompts_and_computes_what_masks_hide() -> None:
    point = RolloutPoint(300, 4, 3)
    assert CONTESTANTS[WITHOUT_FORMULA].done is None
    found, shape = counted(WITHOUT_FORMULA, point)["flops"], SIZES["small"]
    # No last layer is trimmed; a prompt's first 299 tokens are read once, its last one by every rollout.
    least = forward_done_flops(shape, ForwardDone(299 + 12, 299 + 12, 0, 299 * 150, 299 * 150, 12))
    repeated = forward_done_flops(shape, repeated_generation_done(point))
    assert least < found < repeated


def test_what_is_not_counted_says_why() -> None:
    with pytest.raises(CannotRun, match="CUDA graphs"):
        counted(WITHOUT_FORMULA, RolloutPoint(30, 2, 3), "cuda", "bf16")
    with pytest.raises(CannotRun, match="other kernels on a GPU"):
        counted(OURS, RolloutPoint(30, 2, 3), "cuda")
