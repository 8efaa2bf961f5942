"""Qwen's position rule equals the positions recorded from Qwen's published code; transformers' rule its own.

The recording: ``tests/recordings/record_positions.py``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runs import ROOT
from tests.support.tiny import tiny_model
from vlm_pg.errors import ModelError
from vlm_pg.models import positions
from vlm_pg.models.positions import TOKEN_TYPES, MergedGrid, grid_times, one_per_grid, qwen_positions
from vlm_pg.models.registry import FAMILIES
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.types import Prompt

RECORDING = ROOT / "tests/recordings/positions.npz"


@dataclass(frozen=True)
class Recorded:
    """A layout, the positions int64 [3, P] recorded for it, and the position of the first response token."""

    layout: dict[str, Any]
    positions: torch.Tensor
    following: int

    @property
    def inputs(self) -> dict[str, Any]:
        """What a processor would return, with patches of one number."""
        layout = self.layout
        types = torch.tensor([code for code, length in layout["runs"] for _ in range(length)])[None]
        inputs: dict[str, Any] = {"input_ids": torch.zeros_like(types), "mm_token_type_ids": types}
        names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
        for kind, (pixels, grids) in names.items():
            of_kind = [grid for k, grid in zip(layout["kinds"], layout["grids"], strict=True) if k == kind]
            if of_kind:
                inputs[grids] = torch.tensor(of_kind)
                inputs[pixels] = torch.zeros(int(inputs[grids].prod(-1).sum()), 1)
        return inputs | ({"second_per_grid_ts": layout["seconds"]} if layout["seconds"] else {})

    def prompt(self, rule: str, family: str | None = None, model: Any = None) -> Prompt:
        """The prompt as a family counts it, by default the recorded one."""
        model = model or bare_model(self.layout["tokens_per_second"])
        of_family: Any = FAMILIES[family or self.layout["family"]]
        return prompt_from_processor(self.inputs, lambda *args: of_family.positions(rule, model, *args))

    @property
    def is_past_its_space(self) -> bool:
        """Whether the time of a video reaches beyond its rows and columns."""
        return bool((self.positions[0] > self.positions[1:].max(0).values).any())

    @property
    def ends_in_a_medium(self) -> bool:
        return self.layout["runs"][-1][0] in TOKEN_TYPES.values()


def bare_model(tokens_per_second: int | None) -> Any:
    """All that counting by Qwen's rule reads of a model."""
    vision = SimpleNamespace(
        patch_size=14, spatial_merge_size=2, temporal_patch_size=2, in_channels=3, tokens_per_second=tokens_per_second
    )
    return SimpleNamespace(config=SimpleNamespace(vision_config=vision))


@lru_cache(maxsize=1)
def recorded_layouts() -> tuple[Recorded, ...]:
    with np.load(RECORDING) as file:
        layouts = [json.loads(line) for line in file["layouts"].tobytes().decode().splitlines()]
        differences = torch.from_numpy(file["differences"].astype(np.int64))
    lengths = [sum(length for _, length in layout["runs"]) for layout in layouts]
    parts = differences.split(lengths, dim=1)
    return tuple(Recorded(a, part.cumsum(1), a["next"]) for a, part in zip(layouts, parts, strict=True))


SMALL = MergedGrid("image", torch.zeros(1, dtype=torch.int64), 1, 2)


def of_part(part: str) -> list[Recorded]:
    return [recorded for recorded in recorded_layouts() if recorded.layout["part"] == part]


@pytest.mark.parametrize(("part", "count"), [("whole", 500), ("fractional", 200)])
def test_positions_equal_those_recorded_from_qwens_code(part: str, count: int) -> None:
    equal = 0
    for recorded in of_part(part):
        prompt = recorded.prompt("qwen")
        assert torch.equal(prompt.positions_3P, recorded.positions), recorded.layout
        assert prompt.next_position == recorded.following, recorded.layout
        equal += 1
    assert equal == count


def test_the_recording_has_what_is_hard() -> None:
    """Long times, several videos, ends in a medium, no media: enough of each in both parts."""
    for part in ("whole", "fractional"):
        layouts = of_part(part)
        assert sum(recorded.is_past_its_space for recorded in layouts) > 100
        assert sum(recorded.ends_in_a_medium for recorded in layouts) > 10
        assert sum(recorded.layout["kinds"].count("video") > 1 for recorded in layouts) > 50
        assert sum(not recorded.layout["kinds"] for recorded in layouts) > 5
    assert any(seconds != int(seconds) for recorded in of_part("fractional") for seconds in recorded.layout["seconds"])
    families = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
    assert {recorded.layout["family"] for recorded in of_part("whole")} == families


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_where_words_tell_the_time_both_rules_agree(family: str) -> None:
    """Qwen3.5 is younger than the releases the recording is from; it counts as Qwen3-VL does."""
    model = tiny_model(family)
    layouts = [recorded for recorded in of_part("whole") if recorded.layout["family"] == "qwen3_vl"]
    # transformers' own code is slow on many short media
    chosen = [recorded for recorded in layouts if len(recorded.layout["runs"]) < 60][:10]
    assert sum("video" in recorded.layout["kinds"] for recorded in chosen) > 3
    for recorded in chosen:
        ours, theirs = recorded.prompt("qwen", family, model), recorded.prompt("transformers", family, model)
        assert torch.equal(ours.positions_3P, recorded.positions) and ours.next_position == recorded.following
        assert torch.equal(theirs.positions_3P, recorded.positions) and theirs.next_position == recorded.following


def test_after_a_long_video_text_goes_on_past_its_time() -> None:
    """40 grids of a second each, two positions a second: the last at 2 + 78, then text; transformers 5 goes on at 4."""
    model = tiny_model("qwen2_5_vl")
    types = torch.tensor([0] * 2 + [2] * 160 + [0] * 4)
    given = (torch.zeros_like(types), types, torch.tensor([[40, 4, 4]]), ("video",), (1.0,))
    ours = FAMILIES["qwen2_5_vl"].positions("qwen", model, *given)
    assert ours[0, 2:162:4].tolist() == list(range(2, 81, 2)) and ours[:, -4:].tolist() == [[81, 82, 83, 84]] * 3
    theirs = FAMILIES["qwen2_5_vl"].positions("transformers", model, *given)
    assert theirs[:, -4:].tolist() == [[4, 5, 6, 7]] * 3 and torch.equal(theirs[:, :162], ours[:, :162])


def test_times_of_temporal_grids() -> None:
    assert grid_times(4).tolist() == [0, 1, 2, 3]
    assert grid_times(4, 2, 1.0).tolist() == [0, 2, 4, 6]
    assert grid_times(5, 2, 0.25).tolist() == [0, 0, 1, 1, 2]
    assert grid_times(4, 2).tolist() == [0, 2, 4, 6], "a grid without seconds lasts one"
    alone = one_per_grid([MergedGrid("video", torch.tensor([0, 2]), 1, 3), SMALL])
    assert [(grid.kind, grid.times.tolist(), grid.columns) for grid in alone] == [
        ("video", [0], 3),
        ("video", [0], 3),
        ("image", [0], 2),
    ]


def test_media_may_stand_side_by_side() -> None:
    positions = qwen_positions(torch.tensor([0, 1, 1, 1, 1, 0]), [SMALL, SMALL])
    assert positions.tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 3, 5], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("types", "media", "words"),
    [
        ([0, 1, 1], [], "token 1 is visual, and no medium is left for it"),
        ([0, 1, 0], [SMALL], "one image of 2 tokens does not fit the token types from 1 on"),
        ([0, 2, 2], [SMALL], "one image of 2 tokens does not fit the token types from 1 on"),
        ([0, 0], [SMALL], "one image of 2 tokens is left over"),
    ],
)
def test_token_types_and_media_must_belong_together(types: list[int], media: list[MergedGrid], words: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(words)}. Give ids, token types and grids of one processor call"):
        qwen_positions(torch.tensor(types), media)


def test_seconds_are_of_every_video_or_none() -> None:
    types = torch.tensor([2] * 4)
    given = (torch.zeros_like(types), types, torch.tensor([[1, 4, 4]]), ("video",), (1.0, 2.0))
    with pytest.raises(
        ValueError, match="Got second_per_grid_ts for 2 videos, but the prompt has 1; give one entry per"
    ):
        FAMILIES["qwen2_5_vl"].positions("qwen", bare_model(2), *given)


def test_seconds_that_transformers_would_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.17 makes whole seconds of them, so that its positions are not those of its own later releases."""
    types = torch.tensor([0] + [2] * 8 + [0])
    media = (torch.zeros_like(types), types, torch.tensor([[2, 4, 4]]), ("video",))
    family, model = FAMILIES["qwen2_5_vl"], tiny_model("qwen2_5_vl")
    monkeypatch.setattr(positions, "version", lambda package: "5.17.2")
    with pytest.raises(
        ModelError, match=r"0.5 seconds per temporal patch, and transformers 5.17.2 cuts that to 0. Set "
    ):
        family.positions("transformers", model, *media, (0.5,))
    whole = family.positions("transformers", model, *media, (2.0,))
    assert whole[0].tolist() == [0, *[1] * 4, *[5] * 4, 3]
    assert family.positions("qwen", model, *media, (0.5,))[0].tolist() == [0, *[1] * 4, *[2] * 4, 3]
    monkeypatch.setattr(positions, "version", lambda package: "5.18.0")
    later = SimpleNamespace(get_rope_index=lambda *args, **kwargs: (torch.zeros(3, 1, 10), None))
    family.positions("transformers", SimpleNamespace(model=later), *media, (0.5,))


def test_the_rule_is_described_with_its_consequence_for_servers() -> None:
    family: Any = FAMILIES["qwen2_5_vl"]
    qwen = "qwen (tokens after an image or video continue past its largest rotary position on any axis, as in vLLM"
    assert family.describe_positions("qwen").startswith(qwen)
    installed = f"transformers (as transformers {version('transformers')}, which ignores a video's time axis"
    assert family.describe_positions("transformers").startswith(installed)
    both = "qwen (for qwen3_vl both rules are the same: timestamps in the prompt state a video's time)"
    assert FAMILIES["qwen3_vl"].describe_positions("qwen") == both


def test_text_alone_is_counted_alike() -> None:
    types = torch.zeros(5, dtype=torch.int64)
    for rule in ("qwen", "transformers"):
        positions = FAMILIES["qwen2_vl"].positions(rule, bare_model(None), types, types, None, (), ())  # type: ignore[arg-type]
        assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3 and positions.dtype == torch.int64
