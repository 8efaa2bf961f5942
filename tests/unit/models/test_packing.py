"""Which prompts share what: to the token, by medium, and never less in a smaller batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.attention.plan import reading_plan
from vlm_pg.batching.plan import tree_tokens
from vlm_pg.models.packing import (
    ChunkBatch,
    PackedBatch,
    pack,
    pack_chunk,
    pack_prefixes,
    packed_tokens,
    repeated_tokens,
)
from vlm_pg.models.prompt_tree import PromptNode, common_tokens, prompt_tree, shared_tokens
from vlm_pg.types import Prompt, ResponseGroup

VISUAL = 9


def visual_prompt(ids: list[int], **fields: object) -> Prompt:
    tokens = torch.tensor(ids)
    return Prompt("p", tokens, (tokens == VISUAL).long() * 2, torch.arange(len(ids)).expand(3, -1), **fields)  # type: ignore[arg-type]


def test_three_prompts_as_in_the_docstring() -> None:
    common, more = [1] * 500, [2] * 300
    prompts = [
        visual_prompt([*common, *more, *[3] * 30]),
        visual_prompt([*common, *more, *[4] * 20]),
        visual_prompt([*common, *[5] * 60]),
    ]
    tree = prompt_tree(prompts)
    assert tree.nodes == (
        PromptNode(-1, 0, 0, 500),
        PromptNode(0, 0, 500, 800),
        PromptNode(0, 2, 500, 560),
        PromptNode(1, 0, 800, 830),
        PromptNode(1, 1, 800, 820),
    )
    assert tree.end_nodes == (3, 4, 2)
    assert sum(node.num_tokens for node in tree.nodes) == 910
    assert shared_tokens(prompts) == ((830, 800, 500), (800, 820, 500), (500, 500, 560))


def test_a_prompt_may_end_where_another_goes_on() -> None:
    tree = prompt_tree([visual_prompt([1] * 100), visual_prompt([*[1] * 100, *[2] * 10])])
    assert tree.nodes == (PromptNode(-1, 0, 0, 100), PromptNode(0, 1, 100, 110))
    assert tree.end_nodes == (0, 1)


def test_short_runs_are_copied_not_shared() -> None:
    """Three share 100 tokens and two of them 10 more: those 10 stand in both branches."""
    start = [1] * 100
    tree = prompt_tree(
        [visual_prompt([*start, *[2] * 10, 3]), visual_prompt([*start, *[2] * 10, 4]), visual_prompt([*start, 5])]
    )
    assert tree.nodes == (
        PromptNode(-1, 0, 0, 100),
        PromptNode(0, 0, 100, 111),
        PromptNode(0, 1, 100, 111),
        PromptNode(0, 2, 100, 101),
    )
    assert len(prompt_tree([visual_prompt([1] * 63 + [2]), visual_prompt([1] * 63 + [3])]).nodes) == 2
    assert len(prompt_tree([visual_prompt([1] * 64 + [2]), visual_prompt([1] * 64 + [3])]).nodes) == 3


def test_equal_prompts_share_everything_unless_sharing_is_off() -> None:
    pair = [visual_prompt([1, 2, 3]), visual_prompt([1, 2, 3])]
    assert prompt_tree(pair).nodes == (PromptNode(-1, 0, 0, 3),)
    assert prompt_tree(pair, share=False).nodes == (PromptNode(-1, 0, 0, 3), PromptNode(-1, 1, 0, 3))
    assert prompt_tree(pair, share=False).end_nodes == (0, 1)


def test_positions_must_agree_too() -> None:
    a, b = visual_prompt([1] * 200), visual_prompt([1] * 200)
    moved = b.positions_3P.clone()
    moved[1, 150:] += 1
    later = Prompt("q", b.input_ids, b.mm_token_type_ids, moved)
    assert common_tokens([a, later])[0][1] == 150


def grids(*sizes: int) -> torch.Tensor:
    """Media of so many visual tokens each (four patches per token)."""
    return torch.tensor([[1, 4, size] for size in sizes])


def test_visual_tokens_are_the_same_only_for_the_same_medium() -> None:
    """Two videos between words: 1 [70 visual] 2 [30 visual] 3."""
    ids = [1, *[VISUAL] * 70, 2, *[VISUAL] * 30, 3]
    a = visual_prompt(ids, grid_thw=grids(70, 30), media_keys=("x", "y"))
    same = visual_prompt(ids, grid_thw=grids(70, 30), media_keys=("x", "y"))
    first_only = visual_prompt(ids, grid_thw=grids(70, 30), media_keys=("x", "z"))
    neither = visual_prompt(ids, grid_thw=grids(70, 30), media_keys=("z", "y"))
    assert common_tokens([a, same, first_only, neither])[0] == [103, 103, 72, 1]
    # The border is the medium's first token: no split inside one.
    assert [node.start for node in prompt_tree([a, first_only]).nodes] == [0, 72, 72]


def test_without_media_keys_all_media_must_agree() -> None:
    ids = [1, *[VISUAL] * 70, 2]
    x, also_x, y = (
        visual_prompt([*ids, end], grid_thw=grids(70), content_key=key) for end, key in ((3, "x"), (4, "x"), (3, "y"))
    )
    assert common_tokens([x, also_x, y]) == [[73, 72, 1], [72, 73, 1], [1, 1, 73]]
    unknown = [visual_prompt([*ids, 3], grid_thw=grids(70)) for _ in range(2)]
    assert common_tokens(unknown)[0][1] == 1


def test_media_keys_must_fit_the_media() -> None:
    with pytest.raises(ValueError, match="has 1 media_keys for 2 media"):
        common_tokens([visual_prompt([VISUAL] * 4, grid_thw=grids(2, 2), media_keys=("x",))])


def test_a_smaller_batch_shares_no_less_where_two_short_runs_follow_each_other() -> None:
    """Runs of 100, 60 and 60 tokens: with the first prompt gone, the first two become one that is long enough."""
    x, y, z = [1] * 100, [2] * 60, [3] * 60
    prompts = [
        visual_prompt([*x, 5]),
        visual_prompt([*x, *y, 8]),
        visual_prompt([*x, *y, *z, 7]),
        visual_prompt([*x, *y, *z, 6]),
    ]
    assert shared_tokens(prompts)[2][3] == 100
    assert shared_tokens(prompts[1:])[1][2] == 160
    assert shared_tokens(prompts[2:])[0][1] == 220


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@given(st.lists(IDS, min_size=1, max_size=7), st.integers(1, 4), st.data())
def test_the_tree_spells_every_prompt_and_smaller_batches_share_no_less(
    ids: list[list[int]], min_shared: int, data: st.DataObject
) -> None:
    prompts = [visual_prompt(i) for i in ids]
    tree = prompt_tree(prompts, min_shared=min_shared)
    for index, node in enumerate(tree.end_nodes):
        spelled: list[int] = []
        while node != -1:
            entry = tree.nodes[node]
            spelled = ids[entry.owner][entry.start : entry.stop] + spelled
            node = entry.parent
        assert spelled == ids[index]
    shared = shared_tokens(prompts, min_shared)
    # What the plan counts is what the stream will hold.
    computed = sum(node.num_tokens for node in tree.nodes)
    assert tree_tokens([len(i) for i in ids], range(len(ids)), lambda i, j: shared[i][j]) == computed
    chosen = data.draw(st.lists(st.sampled_from(range(len(ids))), min_size=1, unique=True))
    smaller = shared_tokens([prompts[i] for i in chosen], min_shared)
    for a, i in enumerate(chosen):
        for b, j in enumerate(chosen):
            assert smaller[a][b] >= shared[i][j]


CPU = torch.device("cpu")


def prompt(ids: list[int], types: list[int] | None = None) -> Prompt:
    positions = torch.arange(len(ids)).expand(3, -1)
    return Prompt("p", torch.tensor(ids), torch.tensor(types or [0] * len(ids)), positions)


def group(ids: list[int], *responses: list[int], types: list[int] | None = None) -> ResponseGroup:
    return ResponseGroup(prompt(ids, types), tuple(torch.tensor(response) for response in responses))


def rows_read(batch: PackedBatch | ChunkBatch) -> list[int]:
    """Stream rows that predict, response token by response token."""
    rows = reading_plan(batch.tree, batch.reads).rows
    return [rows[index] for index in batch.predict_rows.tolist()]


def test_prefixes_come_first_and_first_tokens_are_predicted_by_their_ends() -> None:
    batch = pack([group([1, 2, 3], [7, 8, 9], [6]), group([4, 5], [7, 6])], CPU)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 7]
    assert batch.positions_3T.tolist() == [[0, 1, 2, 0, 1, 3, 4, 2]] * 3
    assert (batch.tree.lengths, batch.tree.parents) == ((3, 2, 2, 1), (-1, -1, 0, 1))
    assert batch.reads == ("last", "last", "all", "all")
    assert (batch.num_tokens, batch.num_prompt_tokens) == (8, 5)
    assert rows_read(batch) == [2, 5, 6, 2, 4, 7]
    assert batch.targets.tolist() == [7, 8, 9, 6, 7, 6]
    # Of the prefixes only the last rows are read: 2, 4, then the responses' 5, 6, 7.
    assert batch.predict_rows.tolist() == [0, 2, 3, 0, 1, 4]
    parts = batch.split(torch.arange(6))
    assert [[response.tolist() for response in of_group] for of_group in parts] == [[[0, 1, 2], [3]], [[4, 5]]]


def test_media_rows_point_into_the_stream() -> None:
    batch = pack([group([1, 9, 9, 2], [7], types=[0, 2, 2, 0]), group([9, 3], [7], types=[1, 0])], CPU)
    assert batch.media_rows.tolist() == [1, 2, 4]
    assert batch.feature_rows is None


VIDEO = [1, *[9] * 70, 2]
KINDS = [0, *[2] * 70, 0]


def on_video(question: list[int], *responses: list[int], key: str = "x") -> ResponseGroup:
    ids = VIDEO + question
    made = Prompt(
        "p",
        torch.tensor(ids),
        torch.tensor(KINDS + [0] * len(question)),
        torch.arange(len(ids)).expand(3, -1),
        content_key=key,
    )
    return ResponseGroup(made, tuple(torch.tensor(response) for response in responses))


def test_questions_on_one_video_hold_it_once() -> None:
    """Another video is between them; its features keep their index in the groups' features."""
    groups = [on_video([3, 4], [7, 8]), on_video([3], [6, 7], key="y"), on_video([5], [8, 8, 8], [6])]
    batch = pack(groups, CPU)
    # The shared video first, as it has question nodes; the other video's prompt; the questions; responses.
    assert batch.tree.lengths == (72, 73, 2, 1, 1, 1, 2)
    assert batch.tree.parents == (-1, -1, 0, 0, 1, 2, 3)
    assert batch.reads == ("none", "last", "last", "last", "all", "all", "all")
    assert batch.input_ids.tolist() == [*VIDEO, *VIDEO, 3, 3, 4, 5, 6, 7, 8, 8]
    assert batch.media_rows.tolist() == [*range(1, 71), *range(73, 143)]
    assert batch.feature_rows is not None and batch.feature_rows.tolist() == list(range(140))
    assert rows_read(batch) == [146, 149, 144, 148, 147, 150, 151, 147]
    assert batch.targets.tolist() == [7, 8, 6, 7, 8, 8, 8, 6]
    assert batch.positions_3T[0, 145:].tolist() == [72, 73, 72, 73, 74, 73, 74]
    assert (batch.num_prompt_tokens, batch.tokens_shared, batch.num_sharing) == (74 + 73 + 73, 72, 2)


def test_prefixes_alone() -> None:
    batch = pack_prefixes([on_video([3, 4], [7, 8]), on_video([5], [8, 8, 8], [6])], CPU)
    assert (batch.tree.lengths, batch.reads, batch.end_nodes) == ((72, 2, 1), ("none", "last", "last"), (1, 2))
    assert (batch.num_tokens, batch.tokens_shared) == (75, 72)


def test_a_chunk_holds_its_responses_rows_only() -> None:
    """Prompt rows read are 0 and 1; the chunk's own rows come after them."""
    groups = [on_video([3, 4], [7, 8], [5, 6, 4]), on_video([5], [8, 8, 8], [6])]
    prefixes = pack_prefixes(groups, CPU)
    chunk = pack_chunk(prefixes, groups, [[1], [0, 1]], CPU)
    assert chunk.input_ids.tolist() == [5, 6, 8, 8]
    assert chunk.positions_3T.tolist() == [[74, 75, 73, 74]] * 3
    assert chunk.tree.lengths == (72, 2, 1, 2, 2)
    assert chunk.tree.parents == (-1, 0, 0, 1, 2)
    assert chunk.reads == ("none", "none", "none", "all", "all")
    assert chunk.node_of_prefix == (0, 1, 2)
    assert chunk.predict_rows.tolist() == [0, 2, 3, 1, 4, 5, 1]
    assert chunk.targets.tolist() == [5, 6, 4, 8, 8, 8, 6]
    assert chunk.response_lengths == ((3,), (3, 1))
    assert chunk.num_tokens == 4


def test_responses_stand_between_prompts_of_different_depth() -> None:
    """One prompt goes on where the other ends: its response is a sibling of the continuation."""
    short, long = group([1] * 70, [7, 8]), group([*[1] * 70, 2, 3], [6, 5])
    prefixes = pack_prefixes([short, long], CPU)
    assert prefixes.tree.lengths == (70, 2)
    assert prefixes.reads == ("last", "last")
    chunk = pack_chunk(prefixes, [short, long], [[0], [0]], CPU)
    assert chunk.tree.lengths == (70, 2, 1, 1)
    assert chunk.tree.parents == (-1, 0, 0, 1)
    assert chunk.node_of_prefix == (0, 1)
    assert chunk.input_ids.tolist() == [7, 6]
    assert chunk.predict_rows.tolist() == [0, 2, 1, 3]


def test_prefix_nodes_keep_their_order_behind_responses_of_a_level_above() -> None:
    """Level 1 holds a prompt's response before level 2 holds the other's deepest node."""
    deep = [group([*[1] * 70, *[2] * 70, last], [7, 8]) for last in (3, 4)]
    other = group([5, 6], [6, 5])
    groups = [other, *deep]
    prefixes = pack_prefixes(groups, CPU)
    assert prefixes.tree.lengths == (140, 2, 1, 1)
    chunk = pack_chunk(prefixes, groups, [[0], [0], [0]], CPU)
    assert chunk.tree.lengths == (140, 2, 1, 1, 1, 1, 1)
    assert chunk.tree.parents == (-1, -1, 0, 0, 1, 2, 3)
    goes_on = group([*[1] * 70, *[2] * 70, 3, *[4] * 70], [7, 8])
    ends = group([*[1] * 70], [7, 9])
    groups = [ends, deep[0], goes_on]
    prefixes = pack_prefixes(groups, CPU)
    assert prefixes.tree.lengths == (70, 71, 70)
    chunk = pack_chunk(prefixes, groups, [[0], [0], [0]], CPU)
    # Levels: 70 | 71, response of `ends` | 70, response of the middle | response of the deepest.
    assert chunk.tree.parents == (-1, 0, 0, 1, 1, 3)
    assert chunk.node_of_prefix == (0, 1, 3)
    assert chunk.reads == ("none", "none", "all", "none", "all", "all")
    assert chunk.predict_rows.tolist() == [0, 3, 1, 4, 2, 5]


def test_a_chunk_of_single_tokens_has_no_rows() -> None:
    groups = [group([1, 2], [7], [8, 9])]
    prefixes = pack_prefixes(groups, CPU)
    chunk = pack_chunk(prefixes, groups, [[0]], CPU)
    assert chunk.input_ids.shape == (0,)
    assert chunk.positions_3T.shape == (3, 0)
    assert chunk.tree.lengths == (2,)
    assert chunk.predict_rows.tolist() == [0]


def test_chunks_are_checked() -> None:
    groups = [group([1, 2], [7], [8, 9])]
    prefixes = pack_prefixes(groups, CPU)
    with pytest.raises(ValueError, match="pass the groups of the prefix batch"):
        pack_chunk(prefixes, [*groups, *groups], [[0], [0]], CPU)
    with pytest.raises(ValueError, match="choose at least one"):
        pack_chunk(prefixes, groups, [[]], CPU)
    with pytest.raises(ValueError, match="Indices go from 0 to 1"):
        pack_chunk(prefixes, groups, [[2]], CPU)


def test_token_counts() -> None:
    assert packed_tokens(100, [5, 1, 3]) == 100 + 4 + 0 + 2
    assert repeated_tokens(100, [5, 1, 3]) == 104 + 100 + 102


@pytest.mark.parametrize(
    "groups, message", [([], "no groups"), ([group([1])], "has no responses"), ([group([1], [])], "at least one token")]
)
def test_what_cannot_be_packed_is_refused(groups: list[ResponseGroup], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(groups, CPU)
