"""Streams shared out over two and four sequence ranks: values and gradients of one process, in every family.

With four ranks the tiny models have fewer key-value heads than ranks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.processes import launch_ranks
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES

TOLERANCE = 1e-5


def case(family: str, chunked: bool = False, checkpointing: bool = False, **more: Any) -> dict[str, Any]:
    trains = family in VL_FAMILY_NAMES and not more.get("lora")
    return {"family": family, "chunked": chunked, "checkpointing": checkpointing, "train_vision": trains, **more}


WHOLE_AND_CHUNKS = [
    case(family, chunked, checkpointing)
    for family in FAMILY_NAMES
    for chunked, checkpointing in ((False, True), (True, False))
]
CASES = [
    *(case(family, chunked=place % 2 == 0, checkpointing=place % 2 == 1) for place, family in enumerate(FAMILY_NAMES)),
    case("qwen2_5_vl", chunked=True, checkpointing=True),
    *(case(family, chunked, small=True) for family in ("qwen3_vl_moe", "qwen3_5") for chunked in (False, True)),
    *(case("qwen3_vl", chunked, checkpointing=True, lora=True) for chunked in (False, True)),
]


@pytest.mark.parametrize(
    "cases", [pytest.param(WHOLE_AND_CHUNKS, marks=pytest.mark.matrix, id="all"), pytest.param(CASES, id="some")]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_add_up_to_the_whole(ranks: int, cases: list[dict[str, Any]]) -> None:
    printed = launch_ranks("tests.numerics.sequence_ranks", json.dumps(cases), ranks=ranks, timeout_seconds=500)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    assert [line["case"] for line in lines] == cases
    for line in lines:
        print(line)
        assert line["error"] < TOLERANCE and line["weights"] > 20, line
