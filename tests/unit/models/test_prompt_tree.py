"""Which prompts share what: to the token, by medium, and never less in a smaller batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_pg.batching.plan import tree_tokens
from vlm_pg.models.prompt_tree import PromptNode, common_tokens, prompt_tree, shared_tokens
from vlm_pg.types import Prompt

VISUAL = 9


def prompt(ids: list[int], **fields: object) -> Prompt:
    tokens = torch.tensor(ids)
    return Prompt("p", tokens, (tokens == VISUAL).long() * 2, torch.arange(len(ids)).expand(3, -1), **fields)  # type: ignore[arg-type]


def test_three_prompts_as_in_the_docstring() -> None:
    common, more = [1] * 500, [2] * 300
    prompts = [prompt([*common, *more, *[3] * 30]), prompt([*common, *more, *[4] * 20]), prompt([*common, *[5] * 60])]
    tree = prompt_tree(prompts)
    assert tree.nodes == (
        PromptNode(-1, 0, 0, 500),
        PromptNode(0, 0, 500, 800),
        PromptNode(0, 2, 500, 560),
        PromptNode(1, 0, 800, 830),
        PromptNode(1, 1, 800, 820),
    )
    assert tree.end_nodes == (3, 4, 2)
    assert tree.num_tokens == 910
    assert shared_tokens(prompts) == ((830, 800, 500), (800, 820, 500), (500, 500, 560))


def test_a_prompt_may_end_where_another_goes_on() -> None:
    tree = prompt_tree([prompt([1] * 100), prompt([*[1] * 100, *[2] * 10])])
    assert tree.nodes == (PromptNode(-1, 0, 0, 100), PromptNode(0, 1, 100, 110))
    assert tree.end_nodes == (0, 1)


def test_short_runs_are_copied_not_shared() -> None:
    """Three share 100 tokens and two of them 10 more: those 10 stand in both branches."""
    start = [1] * 100
    tree = prompt_tree([prompt([*start, *[2] * 10, 3]), prompt([*start, *[2] * 10, 4]), prompt([*start, 5])])
    assert tree.nodes == (
        PromptNode(-1, 0, 0, 100),
        PromptNode(0, 0, 100, 111),
        PromptNode(0, 1, 100, 111),
        PromptNode(0, 2, 100, 101),
    )
    assert len(prompt_tree([prompt([1] * 63 + [2]), prompt([1] * 63 + [3])]).nodes) == 2
    assert len(prompt_tree([prompt([1] * 64 + [2]), prompt([1] * 64 + [3])]).nodes) == 3


def test_equal_prompts_share_everything_unless_sharing_is_off() -> None:
    pair = [prompt([1, 2, 3]), prompt([1, 2, 3])]
    assert prompt_tree(pair).nodes == (PromptNode(-1, 0, 0, 3),)
    assert prompt_tree(pair, share=False).nodes == (PromptNode(-1, 0, 0, 3), PromptNode(-1, 1, 0, 3))
    assert prompt_tree(pair, share=False).end_nodes == (0, 1)


def test_positions_must_agree_too() -> None:
    a, b = prompt([1] * 200), prompt([1] * 200)
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
    a = prompt(ids, grid_thw=grids(70, 30), media_keys=("x", "y"))
    same = prompt(ids, grid_thw=grids(70, 30), media_keys=("x", "y"))
    first_only = prompt(ids, grid_thw=grids(70, 30), media_keys=("x", "z"))
    neither = prompt(ids, grid_thw=grids(70, 30), media_keys=("z", "y"))
    assert common_tokens([a, same, first_only, neither])[0] == [103, 103, 72, 1]
    # The border is the medium's first token: no split inside one.
    assert [node.start for node in prompt_tree([a, first_only]).nodes] == [0, 72, 72]


def test_without_media_keys_all_media_must_agree() -> None:
    ids = [1, *[VISUAL] * 70, 2]
    x, also_x, y = (
        prompt([*ids, end], grid_thw=grids(70), content_key=key) for end, key in ((3, "x"), (4, "x"), (3, "y"))
    )
    assert common_tokens([x, also_x, y]) == [[73, 72, 1], [72, 73, 1], [1, 1, 73]]
    unknown = [prompt([*ids, 3], grid_thw=grids(70)) for _ in range(2)]
    assert common_tokens(unknown)[0][1] == 1


def test_media_keys_must_fit_the_media() -> None:
    with pytest.raises(ValueError, match="has 1 media_keys for 2 media"):
        common_tokens([prompt([VISUAL] * 4, grid_thw=grids(2, 2), media_keys=("x",))])


def test_a_smaller_batch_shares_no_less_where_two_short_runs_follow_each_other() -> None:
    """Runs of 100, 60 and 60 tokens: with the first prompt gone, the first two become one that is long enough."""
    x, y, z = [1] * 100, [2] * 60, [3] * 60
    prompts = [prompt([*x, 5]), prompt([*x, *y, 8]), prompt([*x, *y, *z, 7]), prompt([*x, *y, *z, 6])]
    assert shared_tokens(prompts)[2][3] == 100
    assert shared_tokens(prompts[1:])[1][2] == 160
    assert shared_tokens(prompts[2:])[0][1] == 220


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


@given(st.lists(IDS, min_size=1, max_size=7), st.integers(1, 4), st.data())
def test_the_tree_spells_every_prompt_and_smaller_batches_share_no_less(
    ids: list[list[int]], min_shared: int, data: st.DataObject
) -> None:
    prompts = [prompt(i) for i in ids]
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
    assert tree_tokens([len(i) for i in ids], range(len(ids)), lambda i, j: shared[i][j]) == tree.num_tokens
    chosen = data.draw(st.lists(st.sampled_from(range(len(ids))), min_size=1, unique=True))
    smaller = shared_tokens([prompts[i] for i in chosen], min_shared)
    for a, i in enumerate(chosen):
        for b, j in enumerate(chosen):
            assert smaller[a][b] >= shared[i][j]
