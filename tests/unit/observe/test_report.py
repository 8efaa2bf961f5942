"""The report is one file that shows what the run's folder holds and executes none of it, however long or damaged."""

from __future__ import annotations

import json
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.observe.builders import make_group, make_run, make_summary
from vlm_pg.errors import ConfigError
from vlm_pg.observe.logs import RolloutsLog
from vlm_pg.observe.report import timeline
from vlm_pg.observe.report.charts import (
    MAX_POINTS,
    Curve,
    LineChart,
    draw_chart,
    drawn_points,
    make_curve,
    make_frame,
    nice_ticks,
    rolling_mean,
    tick_label,
)
from vlm_pg.observe.report.page import write_report
from vlm_pg.observe.report.read import Series
from vlm_pg.observe.report.rollouts import choose_questions, highlight
from vlm_pg.observe.run_folder import RunFolder

HOSTILE = '<script>alert(1)</script><img src="https://evil.example/x.png" onerror=alert(2)></pre>\x1b[2J\u202e'


class Page(HTMLParser):
    """Collects elements and their attributes, and checks that what is opened is closed."""

    VOID = frozenset(("meta", "img", "br", "link", "line", "circle", "path"))

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def render(folder: RunFolder) -> str:
    return write_report(folder.path).read_text("utf-8")


def test_every_section_shows_the_runs_numbers(tmp_path: Path) -> None:
    html = render(make_run(tmp_path / "run"))
    page = Page(html)
    assert page.open == []
    assert html.count('<figure class="chart">') >= 3
    for shown in (
        "44.7\u202f%", "93.5\u202f%", "+48.8 points on 200 questions (seen)",
        "7 unusable",
        "62.5\u202f% <small>k=8</small>", "± 2.0", "n = 200", "Controls",
        "assets/tiny", "data/train.jsonl", "4.00×", "generating rollouts", "1 min 40 s", "missing_media",
        "Not logged in this run: Spread of the reward, Entropy of the policy, Response length, Gradient norm, Seconds",
        "<b>Reward</b> <span class=\"unit\">mean over rollouts</span>",
        "9.mp4 is &lt;not&gt; there", "2.15.0", "Which colour is first?", "advantage +0.70", "finished",
    ):  # fmt: skip
        assert shown in html, shown
    assert "in progress" not in html and re.findall(r"<h4>step (\d+)", html) == ["1", "4"]


def test_the_file_is_self_contained(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    page = Page(render(folder))
    sources = [
        value for tag, attributes in page.elements for key, value in attributes.items()
        if key in ("src", "href", "srcset", "data", "action", "poster", "xlink:href") and value
    ]  # fmt: skip
    assert any(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert all(source.startswith(("data:image/jpeg;base64,", "#")) for source in sources)
    assert not any(tag in ("link", "iframe", "object", "embed", "base") for tag, _ in page.elements)
    text = folder.report.read_text("utf-8")
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import", style)
    policy = str(next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes))
    assert policy.startswith("default-src 'none'")
    assert re.search(r"script-src 'sha256-[^']+'$", policy)


def test_model_and_data_text_cannot_become_markup(tmp_path: Path) -> None:
    clean = Page(render(make_run(tmp_path / "clean")))
    group = make_group(HOSTILE, (HOSTILE, f"<think>{HOSTILE}</think><answer>{HOSTILE}</answer>"), question=HOSTILE)
    folder = make_run(tmp_path / "hostile", groups=[group])
    folder.write_config(json.dumps({"run": {"name": HOSTILE}, "model": {"path": HOSTILE}, "data": {"train": HOSTILE}}))
    summary = make_summary()
    summary["versions"][HOSTILE] = HOSTILE
    summary["attention_kernel"] = HOSTILE
    summary["eval_after"]["sets"][HOSTILE] = dict(summary["eval_after"]["sets"]["seen"], n=HOSTILE)
    summary["seconds"][HOSTILE] = 1.0
    summary["bad_samples"][HOSTILE] = 1
    folder.write_summary(summary)
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": 5, "phase": HOSTILE, HOSTILE: 1.0, f"reward/{HOSTILE}": 1.0}) + "\n")
        file.write(json.dumps({"step": 6, "phase": "train", HOSTILE: 1.0, f"reward/{HOSTILE}": 1.0}) + "\n")
    declared = {"unit": HOSTILE, "chart": {"title": HOSTILE, "place": 1, "as_percent": False, "smooth": True}}
    folder.curves.write_text(json.dumps({"kl": declared, f"reward/{HOSTILE}": declared}))
    html = render(folder)
    page = Page(html)
    assert page.open == []
    assert not re.search("<script>alert|\x1b|\u202e", html)
    runnable = [attributes for tag, attributes in page.elements if tag == "script" and "type" not in attributes]
    assert len(runnable) == 1
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in clean.elements} | {"circle"}


def test_think_and_answer_are_marked() -> None:
    tag = '<span class="tag">&lt;{}&gt;</span>'
    assert highlight("a<think>b</think><answer>C") == (
        "a" + tag.format("think") + '<span class="think">b</span>' + tag.format("/think")
        + tag.format("answer") + '<span class="answer">C</span>'
    )  # fmt: skip
    assert "4,000 more characters" in highlight("x" * 10_000)


def test_a_missing_file_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name, message in (
        ("config.yaml", "config.yaml is not there"),
        ("metrics.jsonl", "metrics.jsonl is not there: no step has been logged"),
        ("rollouts.jsonl", "rollouts.jsonl is not there: no rollouts have been logged"),
        ("curves.json", "curves.json is not there or cannot be read: every metric has a chart of its own"),
        ("summary.json", "summary.json is not there yet"),
        ("thumbnails", ".jpg is not there"),
    ):
        aside = (folder.path / name).rename(tmp_path / name)
        html = render(folder)
        assert message in html and Page(html).open == [] and html.count("<section") == 7
        aside.rename(folder.path / name)


def test_a_run_in_progress(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    folder.write_summary({"eval_before": make_summary()["eval_before"], "eval_after": None, "finished": False})
    for path in (folder.metrics, folder.rollouts):
        with path.open("ab") as file:
            file.write(b'{"step": 3, "pha')
    html = render(folder)
    assert "in progress" in html
    assert "step 2 of 4" in html
    assert "evaluation after training is still to come" in html
    assert "There is no evaluation after training in summary.json." in html
    assert "are no records of a run" not in html


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.metrics.write_bytes(b"{broken\n" + folder.metrics.read_bytes())
    folder.summary.write_text('{"eval_before": ')
    folder.config.write_text("a: [1")
    folder.curves.write_text('{"kl": {"unit": "nat", "chart": {"title": 5}}}')
    html = render(folder)
    assert "curves.json is not there or cannot be read" in html
    assert "metrics.jsonl: 1 line(s) are no records of a run" in html
    assert "summary.json cannot be read" in html
    assert "config.yaml cannot be read" in html and "<pre>a: [1</pre>" in html
    for path in (folder.metrics, folder.rollouts, folder.summary, folder.config, folder.bad_samples):
        path.unlink()
        path.mkdir()
    html = render(folder)
    assert Page(html).open == []
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json", "config.yaml"):
        assert f"{name} cannot be read" in html


ODD_LINES = (
    '{"step": 99999999999999999999, "reward": 1}',
    '{"step": NaN, "reward": 1}',
    '{"step": true, "reward": 1}',
    '{"step": -3, "reward": 1}',
    '{"step": 5, "reward": 1e308, "kl": -1e308, "time": NaN}',
    '{"step": 6, "reward": 1' + "0" * 400 + ', "kl": true, "time": 1e999}',
    '{"step": 7, "reward": 1e-320, "kl": 1e99, "time": 1e99}',
    '{"step": 1' + "0" * 5000 + "}",
    "[" * 100_000,
)


def test_numbers_that_no_run_has_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with folder.metrics.open("a") as file:
        file.write("\n".join(ODD_LINES) + "\n")
    with folder.rollouts.open("a") as file:
        file.write("\n".join(ODD_LINES) + "\n")
    html = render(folder)
    assert Page(html).open == [] and "step 7 of" not in html and "7 steps" in html
    # Four steps, and two lines that are no JSON.
    assert "metrics.jsonl: 6 line(s) are no records of a run" in html


def test_odd_values_do_not_stop_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    text = json.dumps(make_summary())
    for number in ("NaN", "1" + "0" * 400, "true", "[]"):
        for old in ("0.447", "0.02", "200", "100.0", "1000", "4000", "0.625"):
            folder.summary.write_text(text.replace(old, number))
            assert Page(render(folder)).open == []
        folder.config.write_text(f"training: {{steps: {number}}}")
    folder.write_summary({"eval_before": [], "eval_after": {"sets": {"x": None}}, "seconds": 3, "bad_samples": []})
    folder.rollouts.write_text('{"step": 1}\n{"step": "x"}\n[]\n')
    folder.metrics.write_text('{"step": 1, "phase": "train", "reward": NaN, "kl": 1e400, "entropy": "a", "loss": 0}\n')
    assert Page(render(folder)).open == []


def test_fields_of_a_megabyte_do_not_make_the_page_long(tmp_path: Path) -> None:
    long = "<x>" * 350_000
    group = make_group(long, (long, long), question=long)
    folder = make_run(tmp_path / "run", steps=1, groups=[group])
    lines = []
    for line in folder.rollouts.open():
        record = json.loads(line)
        many = {f"{i}{long[:1000]}": 0.5 for i in range(50)}
        lines.append(
            record | {"options": [long[:5000]] * 50, "answer": long, "category": long, "notes": many, "parts": many}
        )
    folder.rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = make_summary()
    summary["versions"] |= {f"{i}{long[:1000]}": long[:1000] for i in range(50)}
    summary["bad_samples"] |= {f"{i}{long[:1000]}": 1 for i in range(50)}
    summary["eval_after"]["sets"] |= {f"{i}{long[:1000]}": {"n": long[:1000]} for i in range(50)}
    summary["attention_kernel"] = long
    folder.write_summary(summary)
    folder.config.write_text("x: " + long)
    with folder.metrics.open("a") as file:
        for i in range(50):
            line = {"step": 5, "phase": long[: 1000 + i], f"reward/{i}{long[:9999]}": 1.0, long[: 99_999 + i]: 1}
            file.write(json.dumps(line) + "\n")
    html = render(folder)
    assert Page(html).open == [] and len(html) < 3_500_000
    assert "1,048,000 more characters in the run's files" in html


def test_a_picture_outside_the_run_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (tmp_path / "secret.jpg").write_bytes(b"secret bytes")
    lines = [dict(json.loads(line), thumbnails="thumbnails/../../secret.jpg") for line in folder.rollouts.open()]
    folder.rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = render(folder)
    assert "lies outside the folder run" in html
    assert "c2VjcmV0" not in html


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run's folder\. One holds config\.yaml.*Give the folder"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="is not a run's folder"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


# ---- curves ----

finite = st.floats(-1e12, 1e12, allow_nan=False)


def curve(values: list[float]) -> Curve:
    return make_curve("x", Series(array("q", range(1, len(values) + 1)), array("d", values)))


def test_rolling_mean_by_hand() -> None:
    assert rolling_mean([0, 3, 6, 0], 3) == [1.5, 3, 3, 3]
    assert rolling_mean([1, 2], 1) == [1, 2]


@given(st.lists(finite, min_size=1, max_size=300), st.integers(4, 60))
def test_drawn_points_hold_the_extremes_and_both_ends(values: list[float], limit: int) -> None:
    drawn = drawn_points(values, limit)
    assert len(drawn) <= max(limit, 1) or len(values) <= limit
    assert drawn == sorted(set(drawn))
    assert {0, len(values) - 1} <= set(drawn)
    assert min(values[index] for index in drawn) == min(values)
    assert max(values[index] for index in drawn) == max(values)


@settings(max_examples=30)
@given(st.lists(finite, min_size=1, max_size=60), st.booleans())
def test_any_finite_values_can_be_drawn_inside_the_frame(values: list[float], as_percent: bool) -> None:
    svg = draw_chart(LineChart("x", "", (curve(values),), as_percent))
    heights = [float(y) for path in re.findall(r' d="M([^"]*)"', svg) for y in re.findall(r" (-?[\d.]+)", path)]
    assert all(0 <= height <= 220 for height in heights)
    assert not re.search(r"nan|inf", svg)


def test_ticks_are_round_and_labels_have_the_decimals_they_need() -> None:
    assert nice_ticks(0, 1, 4) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(1, 300, 6) == [50, 100, 150, 200, 250, 300]
    plain, shares = LineChart("x", "", ()), LineChart("x", "", (), as_percent=True)
    assert [tick_label(tick, 0.25, plain) for tick in (0, 0.25, 0.5, -0.5)] == ["0", "0.25", "0.50", "−0.50"]
    assert tick_label(5000, 5000, plain) == "5,000"
    assert tick_label(2e-6, 1e-6, plain) == "2.0e-6"
    assert tick_label(0.25, 0.25, shares) == "25\u202f%"


def test_rare_spikes_are_cut_and_said() -> None:
    values = [1.0 + 0.01 * (index % 7) for index in range(200)]
    values[50] = 500.0
    chart = LineChart("Gradient norm", "", (curve(values),))
    frame, clipped = make_frame(chart)
    assert clipped == 500.0
    assert frame.high < 3
    assert "spikes up to 500 are cut" in draw_chart(chart)


def test_a_long_run_stays_a_small_file_with_the_step_order_repaired(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    with folder.metrics.open("w") as file:
        for step in [*range(3000, 6001), *range(1, 3000), 5]:
            file.write(json.dumps({"step": step, "phase": "train", "reward": step % 10, "kl": step}) + "\n")
    html = write_report(folder.path).read_text("utf-8")
    data = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html)]
    assert len(data) == 2
    for chart in data:
        steps = chart["curves"][0]["steps"]
        assert len(steps) <= MAX_POINTS
        assert steps == sorted(set(steps))
        assert (steps[0], steps[-1]) == (1, 6000)


def test_questions_seen_again_come_first_and_categories_take_turns(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", resume=False)
    with RolloutsLog(folder, groups_per_step=9, thumbnail_frames=0) as log:
        log.write(1, [make_group("once, early"), make_group("far apart")])
        log.write(2, [make_group("near"), make_group("near")])
        log.write(3, [make_group("near")])
        log.write(9, [make_group("far apart"), make_group("once, late")])
    questions = choose_questions(folder.rollouts, 4)
    seen = [(groups[0].rollouts[0]["sample_id"], [group.step for group in groups]) for groups in questions]
    assert seen == [("far apart", [1, 9]), ("near", [2, 3]), ("once, early", [1]), ("once, late", [9])]
    assert all(len(group.rollouts) == 2 for groups in questions for group in groups)


# ---- the timeline of the last steps ----

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
    folder = make_run(tmp_path / "run", steps=1)
    folder.trace.write_text(text)
    return render(folder)


@pytest.mark.parametrize(("ranks", "drawn", "steps"), [(1, 1, 5), (200, 64, 2)])
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


def test_a_missing_timeline_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    assert "trace.json is not there" in render(folder)
    for text in ("", "\x00\x01{" * 500, trace_text(step_events(1, 0, START)[:-1])):
        folder.trace.write_text(text)
        assert "trace.json holds no whole step yet" in render(folder)
    folder.trace.unlink()
    folder.trace.mkdir()
    assert "trace.json cannot be read" in render(folder)


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


def test_of_a_long_file_the_end_is_read_and_the_names_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_READ_BYTES", 2**14)
    monkeypatch.setattr(timeline, "_HEAD_BYTES", 2**10)
    events = [host_name(3, "node-00")]
    for step in range(1, 100):
        events += step_events(step, 3, START + step * 10_000_000)
    path = tmp_path / "trace.json"
    path.write_text(trace_text(events))
    trace = timeline.read_trace(path)
    assert trace.hosts == {3: "node-00"} and trace.slices[-1].step == 99
    assert 100 < len(trace.slices) < 2**14 / 80
