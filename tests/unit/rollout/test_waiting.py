"""Prompts with a common beginning follow each other, and nodes are needed until their last reader is done."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from vlm_pg.rollout import waiting
from vlm_pg.rollout.waiting import WaitingPrompts
from vlm_pg.types import Prompt

VIDEO = {"kind": "video", "max_side": 8}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Questions on video 9, alone, on video 6, on 9, on 6, on 9."""
    policy = tiny_policy()
    media = (9, None, 6, 9, 6, 9)
    kinds = [{"kind": "text"} if seed is None else VIDEO | {"media_seed": seed} for seed in media]
    return [make_case(policy, seed=i, **kind).prompt for i, kind in enumerate(kinds)]


def test_who_shares_a_video_follows_each_other(prompts: list[Prompt]) -> None:
    line = WaitingPrompts(prompts)
    assert list(line) == line.take(6) == [0, 3, 5, 1, 2, 4]
    assert not len(line)
    shared = {path[0] for path in (line.paths[0], line.paths[3], line.paths[5])}
    assert len(shared) == 1 and len(line.paths[0]) == 2 and len(line.paths[1]) == 1


def test_paths_spell_the_prompts(prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    for together in (2, 128):
        monkeypatch.setattr(waiting, "COMPARED_TOGETHER", together)
        line = WaitingPrompts(prompts)
        for prompt, path in zip(prompts, line.paths, strict=True):
            nodes = [line.nodes[node] for node in path]
            assert [node.parent for node in nodes] == [-1, *path[:-1]]
            ids = [prompts[node.owner].input_ids[node.start : node.stop] for node in nodes]
            assert torch.equal(torch.cat(ids), prompt.input_ids)
        assert sorted(line) == list(range(len(prompts)))


def test_a_node_is_needed_until_its_last_reader_is_done(prompts: list[Prompt]) -> None:
    line = WaitingPrompts(prompts)
    video, question = line.paths[0]
    line.done(0)
    assert line.is_needed(video) and not line.is_needed(question)
    line.done(5)
    assert line.is_needed(video)
    line.done(3)
    assert not line.is_needed(video)
