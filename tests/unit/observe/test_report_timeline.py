"""The report's picture of the last steps: every rank's phases, from whatever trace.json holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.observe.builders import make_run
from tests.unit.observe.test_report import HOSTILE, Page
from vlm_pg.observe.report import write_report
from vlm_pg.observe.report.timeline import read_trace

START = 1_795_417_000_000_000
# Of a step of ten seconds.
PHASES = (("prompts", 0, 1), ("rollout", 1, 5), ("rewards", 5, 6), ("train", 6, 9), ("idle", 8, 9), ("logs", 9, 10))


def step_events(step: int, rank: int, start_us: int, scale: int = 1_000_000) -> list[dict[str, Any]]:
    """A step of ten times ``scale`` microseconds, as trace.json holds it."""
    around = {"ph": "X", "pid": rank, "tid": 0, "args": {"step": step}}
    spans = [*PHASES, ("step", 0, 10)]
    return [
        {"name": name, "ts": start_us + first * scale, "dur": (last - first) * scale, **around}
        for name, first, last in spans
    ]


def host_name(rank: int, host: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} ({host})"}}


def trace_text(events: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n"


def page_with(tmp_path: Path, text: str) -> str:
    folder = make_run(tmp_path / "run")
    folder.trace.write_text(text)
    return write_report(folder.path).read_text()


@pytest.mark.parametrize(("ranks", "drawn", "steps"), [(1, 1, 5), (64, 64, 5), (200, 64, 2)])
def test_every_rank_has_a_bar_with_its_phases(tmp_path: Path, ranks: int, drawn: int, steps: int) -> None:
    events = [host_name(rank, f"node-{rank // 8:02}") for rank in range(ranks)]
    for step in range(1, 8):
        for rank in range(ranks):
            events += step_events(step, rank, START + step * 10_000_000)
    html = page_with(tmp_path, trace_text(events))
    page = Page(html)
    picture = html[html.index('<figure class="lanes">') : html.index("</figure>", html.index('class="lanes"'))]
    titles = re.findall("<title>(.*?)</title>", picture)
    assert page.open == []
    assert len(titles) == drawn * steps * len(PHASES)
    words = r"rank 0 \(node-00\), step 7: (media and prompts|policy update|waiting for other ranks|.*), [1-4] s"
    assert sum(bool(re.fullmatch(words, title)) for title in titles) == len(PHASES)
    # The wait lies within the update, so it is drawn over it.
    of_first = [title for title in titles if title.startswith("rank 0 (node-00), step 7")]
    assert [title.rsplit(": ")[1].split(",")[0] for title in of_first] == [
        "media and prompts", "generating rollouts", "rewards", "policy update", "waiting for other ranks", "logs",
    ]  # fmt: skip
    assert f"Steps {8 - steps} to 7" in html
    assert ("waited for each other 10.0" in html) == (ranks > 1)
    assert ("64 of 200 ranks are drawn" in html) == (ranks == 200)
    ends = [
        float(x) + float(w)
        for x, w in re.findall(r'<rect class="\S+" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', picture)
    ]
    assert max(ends) <= 1080 and html.count("waiting for other ranks</li>") == 1


def test_steps_before_a_resume_are_not_drawn_beside_those_after_it(tmp_path: Path) -> None:
    """Steps 3 and 4 were made twice, an hour apart."""
    hour = 3_600_000_000
    starts = [(step, START + step * 10_000_000) for step in range(1, 5)]
    starts += [(step, START + hour + step * 10_000_000) for step in range(3, 6)]
    html = page_with(tmp_path, trace_text([event for step, start in starts for event in step_events(step, 0, start)]))
    assert "Steps 3 to 5, 30.0 s" in html
    assert html.count("step 3: policy update") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[\n]\n", "trace.json holds no whole step yet"),
        ("", "trace.json holds no whole step yet"),
        ("\x00\x01{" * 500, "trace.json holds no whole step yet"),
        (trace_text(step_events(1, 0, START)[:-1]), "trace.json holds no whole step yet"),
        (None, "trace.json is not there"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, text: str | None, said: str) -> None:
    folder = make_run(tmp_path / "run")
    if text is not None:
        folder.trace.write_text(text)
    assert said in write_report(folder.path).read_text()


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.trace.mkdir()
    assert "trace.json cannot be read" in write_report(folder.path).read_text()


def test_a_killed_runs_last_line_and_odd_values_are_left_out(tmp_path: Path) -> None:
    odd = [
        {"name": 5, "ph": "X", "ts": 0, "dur": 1, "pid": 0, "args": {"step": 1}},
        {"name": "train", "ph": "X", "ts": "x", "dur": 1, "pid": 0, "args": {"step": 1}},
        {"name": "train", "ph": "X", "ts": 0, "dur": -1, "pid": 0, "args": {"step": 1}},
        {"name": "train", "ph": "X", "ts": 1e300, "dur": 1, "pid": 0, "args": []},
        {"name": "train", "ph": "X", "ts": 0, "dur": 1, "pid": True, "args": {"step": 10**30}},
        {"name": "train"},
    ]
    text = trace_text([*odd, *step_events(1, 0, START)])
    html = page_with(tmp_path, text.removesuffix("\n]\n") + ',\n{"name":"tra')
    assert Page(html).open == [] and html.count("step 1: ") == len(PHASES)


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    events = [host_name(0, HOSTILE), *step_events(1, 0, START)]
    events += [dict(events[1], name=HOSTILE * 9)]
    html = page_with(tmp_path, trace_text(events))
    assert Page(html).open == [] and "<script>alert" not in html and 'evil.example/x.png" onerror' not in html


def test_of_a_long_file_the_end_is_read_and_the_names_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("w") as file:
        file.write("[\n" + json.dumps(host_name(3, "node-00")))
        for step in range(1, 30_000):
            for event in step_events(step, 3, START + step * 10_000_000):
                file.write(",\n" + json.dumps(event))
        file.write("\n]\n")
    assert path.stat().st_size > 17 * 2**20
    trace = read_trace(path)
    assert trace.hosts == {3: "node-00"} and trace.slices[-1].step == 29_999
    assert len(trace.slices) < 29_999 * 7
