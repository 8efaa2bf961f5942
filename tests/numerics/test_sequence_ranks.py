"""Streams shared out over two and four sequence ranks: values and gradients of one process, in every family.

With four ranks the tiny models have fewer key-value heads than ranks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.numerics.sequence_memory import HEAD_DIM, HEADS, KEY_VALUE_HEADS, LAYERS, READ_ROWS, RESPONSES
from tests.support.groups import make_case, random_group, tiny_policy
from tests.support.processes import launch_ranks
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES
from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.memory_sizes import LanguageShape
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.plan.flops import sequence_parallel_bytes

TOLERANCE = 1e-5
FP32_BYTES = 4


def case(family: str, chunked: bool = False, checkpointing: bool = False, **more: Any) -> dict[str, Any]:
    trains = family in VL_FAMILY_NAMES and not more.get("lora")
    return {"family": family, "chunked": chunked, "checkpointing": checkpointing, "train_vision": trains, **more}


WHOLE_AND_CHUNKS = [
    case(family, chunked, checkpointing)
    for family in FAMILY_NAMES
    for chunked, checkpointing in ((False, True), (True, False))
]
CASES = [
    *(case(family, chunked=True) for family in ("qwen2_vl", "qwen3_vl_moe", "qwen2")),
    *(case(family, checkpointing=True) for family in ("qwen3_vl", "qwen3_5_moe")),
    case("qwen2_5_vl", chunked=True, checkpointing=True),
    case("qwen3_vl_moe", small=True),
    case("qwen3_5", chunked=True, small=True),
    *(case("qwen3_vl", chunked, checkpointing=True, lora=True) for chunked in (False, True)),
    *(case("qwen3_vl", chunked, checkpointing=True, library=True) for chunked in (False, True)),
]
# Four ranks, more than there are key-value heads: attention, linear attention, a mixture, DeepStack with an adapter.
OF_FOUR = [
    case("qwen2_5_vl", chunked=True, checkpointing=True),
    case("qwen3_5", checkpointing=True),
    case("qwen3_5_moe", chunked=True, checkpointing=False),
    case("qwen3_vl_moe", small=True),
    case("qwen3_vl", checkpointing=True, lora=True),
]
# Updates that start from forwards of sampling, which lie on one rank or the other.
RECORDED = [
    case("qwen2_5_vl", checkpointing=True, recorded=True),
    case("qwen3_vl_moe", chunked=True, recorded=True, tiles=5),
    case("qwen3_5_moe", chunked=True, checkpointing=True, recorded=True),
    case("qwen3_vl", checkpointing=True, recorded=True, lora=True),
    case("qwen3_vl_moe", recorded=True, small=True),
]
ALL_RECORDED = [one | {"recorded": True} for one in WHOLE_AND_CHUNKS]


@pytest.mark.parametrize(
    "ranks, cases",
    [
        pytest.param(2, RECORDED, id="2-recorded"),
        pytest.param(4, RECORDED, marks=pytest.mark.matrix, id="4-recorded"),
        pytest.param(2, ALL_RECORDED, marks=pytest.mark.matrix, id="2-all-recorded"),
        pytest.param(2, CASES, marks=pytest.mark.matrix, id="2-some"),
        pytest.param(2, OF_FOUR[1:4], id="2-few"),
        pytest.param(4, OF_FOUR, marks=pytest.mark.matrix, id="4-some"),
        *(pytest.param(ranks, WHOLE_AND_CHUNKS, marks=pytest.mark.matrix, id=f"{ranks}-all") for ranks in (2, 4)),
        pytest.param(4, CASES, marks=pytest.mark.matrix, id="4-features"),
    ],
)
def test_shares_add_up_to_the_whole(ranks: int, cases: list[dict[str, Any]]) -> None:
    printed = launch_ranks("tests.numerics.sequence_ranks", json.dumps(cases), ranks=ranks, timeout_seconds=500)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    assert [line["case"] for line in lines] == cases
    for line in lines:
        print(line)
        assert line["error"] < TOLERANCE and line["weights"] > 20, line


def test_heads_that_cannot_be_divided_are_an_error() -> None:
    """Of 4 and 2 heads three processes would each take some, and a query head could meet keys that are not its own."""
    policy = tiny_policy()
    groups = [random_group(policy, make_case(policy, "text", seed=0), [3, 2], seed=0)]
    with pytest.raises(ValueError, match=r"for 3 processes, but the model's heads can be divided over 1, 2, 4"):
        backward_in_chunks(policy, groups, lambda chunk: chunk[0][0][1].sum(), None, sequence=SequenceGroup(3))


@pytest.mark.matrix
@pytest.mark.parametrize("prefix", [16384, 1024])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_activations_are_divided_and_what_is_sent_is_known(checkpointing: bool, prefix: int) -> None:
    """At least 1.8 and 3.2 times less memory for activations on two and four ranks."""
    found = {}
    for ranks in (1, 2, 4):
        printed = launch_ranks("tests.numerics.sequence_memory", str(prefix), str(checkpointing), ranks=ranks)
        found[ranks] = json.loads(printed.splitlines()[-1])
        print(prefix, checkpointing, ranks, found[ranks])
    assert found[1]["peak"] >= 1.8 * found[2]["peak"] and found[1]["peak"] >= 3.2 * found[4]["peak"]
    for ranks in (2, 4):
        shape = LanguageShape(256, LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_DIM, 704, 400)
        layer = sequence_parallel_bytes(shape, prefix + READ_ROWS, ranks, FP32_BYTES, checkpointing)
        # In the last layer only rows that are read have queries: the others send none and get no outputs.
        unread = prefix // ranks * HEAD_DIM * 2 * HEADS * (ranks - 1) // ranks * FP32_BYTES
        layers = LAYERS * layer - unread * (3 if checkpointing else 2)
        # Log-probabilities and entropies, padded to the largest share: the first row read predicts all first tokens.
        targets = -(-(READ_ROWS - 1) // ranks) + len(RESPONSES)
        gathered = 2 * (ranks - 1) * FP32_BYTES * targets
        assert all(layers < sent <= layers + gathered for sent in found[ranks]["sent"])


ROLLOUT_CASES = [
    {"family": "qwen2_5_vl", "kinds": ["video", "video", "image"], "settings": {}},
    # Passes that cut nodes: later ones stand behind what is stored already.
    {"family": "qwen2_5_vl", "kinds": ["video", "video"], "settings": {"prefill_tokens": 7}},
    {"family": "qwen3_vl", "kinds": ["images", "text"], "settings": {"prefill_tokens": 11}},
    {"family": "qwen3_5", "kinds": ["video", "video"], "settings": {"prefill_tokens": 9}},
    {"family": "qwen3_5", "kinds": ["image", "text"], "settings": {}},
    # One prompt at a time.
    {"family": "qwen3_vl_moe", "kinds": ["image", "video", "text"], "settings": {"max_batch_rollouts": 3}},
]


@pytest.mark.parametrize("prompt, sizes", [(8192, (2, 4)), (1024, (2,))], ids=["8192", "1024"])
@pytest.mark.matrix
def test_keys_and_values_in_parts_take_a_part_of_the_memory(prompt: int, sizes: tuple[int, ...]) -> None:
    """Tensors of the store: exactly a half and a quarter, but for a row or two a pass. At the peak there is also a
    layer whose heads are exchanged."""
    found = {}
    for ranks in sizes:
        printed = launch_ranks("tests.numerics.sequence_store", str(prompt), ranks=ranks)
        found[ranks] = json.loads(printed.splitlines()[-1])
        print(prompt, ranks, found[ranks])
    for ranks in sizes:
        whole, parts = found[ranks]["never"], found[ranks]["always"]
        assert parts["tokens"] == whole["tokens"]
        passes = -(-prompt // found[ranks]["prefill_tokens"])
        assert whole["stored"] / ranks <= parts["stored"] <= whole["stored"] * (1 / ranks + 2 * passes / prompt)
        assert whole["booked"] >= parts["booked"] >= parts["stored"]
        assert parts["peak"] < whole["peak"] * (0.7 if ranks == 2 else 0.45)


def rollouts_of(cases: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What was found in each case, once the rollouts of all ranks are those of one process."""
    printed = launch_ranks("tests.numerics.sequence_rollouts", json.dumps(cases), ranks=ranks)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    assert [line["case"] for line in lines] == cases
    for line in lines:
        for expected, found in zip(line["expected"], line["found"], strict=True):
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], line["case"]
            for (_, ours), (_, theirs) in zip(found, expected, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)
    return lines


IN_PARTS = {"divide_prefix": "always"}
GREEDY = {"temperature": 0.0}
DIVIDED_CASES = [
    {"family": "qwen2_5_vl", "kinds": ["video", "video"], "settings": IN_PARTS | {"prefill_tokens": 7} | GREEDY},
    # Passes that cut nodes, and rows of one padded batch instead of a block for each cohort.
    {"family": "qwen3_vl", "kinds": ["images", "text"], "settings": IN_PARTS | {"prefill_tokens": 11}, "ragged": True},
    {"family": "qwen3_5", "kinds": ["video", "text"], "settings": IN_PARTS | {"prefill_tokens": 9}, "stop": 3},
    {"family": "qwen3_5_text", "kinds": ["image", "text"], "settings": IN_PARTS, "ragged": True},
]


def divided_cases(family: str) -> list[dict[str, Any]]:
    return [
        {"family": family, "kinds": kinds, "settings": IN_PARTS | more, "ragged": ragged}
        for kinds, more in (
            (["video", "video", "image"], {}),
            (["video", "text", "text"], {"prefill_tokens": 7, "max_new_tokens": 20}),
            # Each by itself; a rank whose rollouts have ended continues to serve.
            (["image", "text"], {"max_batch_rollouts": 3, "max_new_tokens": 70}),
            (["text"], GREEDY),
        )
        for ragged in (False, True)
    ]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(DIVIDED_CASES, id="some"),
        *(pytest.param(divided_cases(family), marks=pytest.mark.matrix, id=family) for family in FAMILY_NAMES),
    ],
)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.matrix), 4])
def test_prompts_in_parts_have_the_rollouts_of_one_process(ranks: int, cases: list[dict[str, Any]]) -> None:
    """Ranks that are done continue to serve: with four ranks, six rollouts are one or two for each."""
    for line in rollouts_of(cases, ranks):
        assert line["divided"] > 0 and "part of the prompts" in line["graphs"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_prompts_prefilled_together_have_the_rollouts_of_one_process(ranks: int) -> None:
    rollouts_of(ROLLOUT_CASES, ranks)


SCORING_CASES = [
    {"family": "qwen2_5_vl", "budget": 10_000},
    # Several passes, which cut groups between their responses.
    {"family": "qwen3_5", "budget": 120},
    {"family": "qwen3_vl", "budget": 200, "settings": {"share_prefix": False}},
    {"family": "qwen3", "budget": 150, "settings": {"lora": {"rank": 4}}, "adapter": True},
    {"long": 1024, "budget": 4096},
]
SCORING_MATRIX = [{"family": family, "budget": budget} for family in FAMILY_NAMES for budget in (90, 10_000)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "cases", [pytest.param(SCORING_MATRIX, marks=pytest.mark.matrix, id="all"), pytest.param(SCORING_CASES, id="some")]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_groups_scored_together_have_the_values_of_each_alone(ranks: int, cases: list[dict[str, Any]]) -> None:
    """A rank may have many groups of its own, one or none; a long prompt takes a part of the memory on each."""
    printed = launch_ranks("tests.numerics.sequence_scoring", json.dumps(cases), ranks=ranks)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    assert [line["case"] for line in lines] == cases
    for line in lines:
        print(line)
        assert line["error"] < TOLERANCE and line["responses"][0] > 1 and min(line["sent"]) > 0
        assert "long" not in line["case"] or line["together"] < line["alone"] * 1.3 / ranks
