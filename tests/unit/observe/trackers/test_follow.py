"""A follower gives every step once, with all its numbers, and rollouts where they are due."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.observe.builders import make_group, make_run, read_lines
from vlm_pg.observe.run_folder import RunFolder
from vlm_pg.observe.trackers.flat import flat_config
from vlm_pg.observe.trackers.follow import Follower
from vlm_pg.observe.trackers.state import TrackerState


def test_every_number_of_every_step_comes_once_under_its_phase(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    follower = Follower(folder, after_step=0, rollouts_every=0)
    given = list(follower.read(2)) + list(follower.read(4)) + list(follower.read(4))
    lines = read_lines(folder.metrics)
    assert [(one.step, one.scalars) for one in given] == [
        (line["step"], {f"train/{key}": line[key] for key in line if key not in ("step", "phase", "time", "grad_norm")})
        for line in lines
    ]
    assert len(given[0].scalars) == 5 and "train/grad_norm" not in given[0].scalars  # null is no number


@pytest.mark.parametrize("every, steps", [(0, []), (1, [1, 2, 3, 4]), (2, [1, 2, 4]), (3, [1, 3]), (25, [1])])
def test_rollouts_come_in_the_first_step_and_every_so_many(every: int, steps: list[int], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    given = [one for one in Follower(folder, 0, every).read(4) if one.rows]
    assert [one.step for one in given] == steps
    for one in given:
        assert [row.response for row in one.rows] == ["<think>red blue</think><answer>B</answer>", "<answer>A</answer>"]
        assert [(row.reward, row.advantage) for row in one.rows] == [(1.1, 0.7), (0.1, pytest.approx(-0.7))]
        assert one.rows[0].parts == "accuracy 1.0, format 1.0"
        assert one.rows[0].question == "Which colour is first?\nA. red\nB. blue" and one.rows[0].answer == "B"
        assert one.rows[0].picture is not None and one.rows[0].picture.is_file()


def test_steps_up_to_the_last_one_handed_over_are_left_out(tmp_path: Path) -> None:
    follower = Follower(make_run(tmp_path / "run", steps=4), after_step=3, rollouts_every=1)
    assert [(one.step, len(one.rows)) for one in follower.read(9)] == [(4, 2)]


def test_what_is_not_finished_waits_and_what_is_damaged_is_passed_over(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    follower = Follower(folder, 0, 1)
    assert list(follower.read(9)) == []
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 1, "phase": "train", "reward": 1.0}\n{broken\n{"no": "step"}\n{"step": 2, "phase": "tra')
        file.flush()
        assert [one.step for one in follower.read(9)] == [1]
        file.write(b'in", "reward": 2.0}\n{"step": 2, "phase": "eval", "reward": true}\n')
        file.flush()
        assert [one.scalars for one in follower.read(9)] == [{"train/reward": 2.0}, {"eval/reward": True}]


def test_lines_that_are_no_rollouts_are_passed_over(tmp_path: Path) -> None:
    """Of a file that was damaged, or written by hand."""
    folder = make_run(tmp_path / "run", steps=2)
    line = read_lines(folder.rollouts)[0]
    odd = [{key: value for key, value in line.items() if key != "options"}, line | {"parts": 3}, line | {"question": 1}]
    odd += [line | {"phase": ["train"]}, line | {"options": None}, line | {"thumbnails": 7}]
    with folder.rollouts.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in odd)
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "phase": ["train"], "reward": 1.0}\n')
    given = list(Follower(folder, 0, 1).read(2))
    assert [(one.step, len(one.rows)) for one in given] == [(1, 2), (2, 2)]


def test_a_step_that_was_not_taken_comes_again(tmp_path: Path) -> None:
    follower = Follower(make_run(tmp_path / "run", steps=3), 0, 1)
    for one in follower.read(3):
        if one.step == 2:
            break
    assert [(one.step, len(one.rows)) for one in follower.read(3)] == [(2, 2), (3, 2)]


def test_long_texts_are_cut_and_control_characters_shown(tmp_path: Path) -> None:
    texts = ("a" * 30_000, "\x1b[31mred\u202e \ud800 \x07")
    folder = make_run(tmp_path / "run", steps=1, groups=[make_group(texts=texts)])
    rows = next(Follower(folder, 0, 1).read(1)).rows
    assert len(rows[0].response) < 10_100 and "[... 20,000 characters left out ...]" in rows[0].response
    assert rows[1].response == "\u241b[31mred\ufffd \ufffd \u2407"


def test_settings_are_flat_and_lists_are_text() -> None:
    nested = {"rollout": {"num_generations": 8, "stop": ["a", "b"]}, "data": {"eval": {"seen": "x.jsonl"}}, "n": None}
    assert flat_config(nested) == {
        "rollout.num_generations": 8,
        "rollout.stop": "['a', 'b']",
        "data.eval.seen": "x.jsonl",
        "n": None,
    }
    assert flat_config("no mapping") == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"run_id": 3, "step": "four"}', b'{"step": true}', None])
def test_a_state_that_cannot_be_read_is_none(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    if content is not None:
        path.write_bytes(content)
    assert TrackerState.read(path) == TrackerState(None, 0)
    TrackerState("abc", 7).write(path)
    assert TrackerState.read(path) == TrackerState("abc", 7)
    assert json.loads(path.read_text()) == {"run_id": "abc", "step": 7}
