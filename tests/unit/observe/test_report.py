"""The report is one file that shows what the run's folder holds and executes none of it."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.observe.builders import make_group, make_run, make_summary
from vlm_pg.errors import ConfigError
from vlm_pg.observe.report import write_report
from vlm_pg.observe.report.rollouts import highlight
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
    assert "in progress" not in html


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.yaml", "config.yaml is not there"),
        ("metrics.jsonl", "metrics.jsonl is not there: no step has been logged"),
        ("rollouts.jsonl", "rollouts.jsonl is not there: no rollouts have been logged"),
        ("curves.json", "curves.json is not there or cannot be read: every metric has a chart of its own"),
        ("summary.json", "summary.json is not there yet"),
        ("thumbnails", "is not there any more"),
    ],
)
def test_a_missing_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, said: str) -> None:
    folder = make_run(tmp_path / "run")
    target = folder.path / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    html = render(folder)
    assert said in html
    assert Page(html).open == []
    assert html.count("<section") == 7


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
    assert "are not JSON" not in html


def test_damaged_files_are_said_not_hidden(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.metrics.write_bytes(b"{broken\n" + folder.metrics.read_bytes())
    folder.summary.write_text('{"eval_before": ')
    folder.config.write_text("a: [1")
    folder.curves.write_text('{"kl": {"unit": "nat", "chart": {"title": 5}}}')
    html = render(folder)
    assert "curves.json is not there or cannot be read" in html
    assert "metrics.jsonl: 1 line(s) are not JSON" in html
    assert "summary.json cannot be read" in html
    assert "config.yaml cannot be read" in html and "<pre>a: [1</pre>" in html


def test_odd_but_valid_values_do_not_stop_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.write_summary({"eval_before": [], "eval_after": {"sets": {"x": None}}, "seconds": 3, "bad_samples": []})
    folder.rollouts.write_text('{"step": 1}\n{"step": "x"}\n[]\n')
    folder.metrics.write_text('{"step": 1, "phase": "train", "reward": NaN, "kl": 1e400, "entropy": "a", "loss": 0}\n')
    assert Page(render(folder)).open == []


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


def test_numbers_that_no_run_has_are_counted_and_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with folder.metrics.open("a") as file:
        file.write("\n".join(ODD_LINES) + "\n")
    with folder.rollouts.open("a") as file:
        file.write("\n".join(ODD_LINES) + "\n")
    html = render(folder)
    assert Page(html).open == [] and "step 7 of" not in html and "7 steps" in html
    # Four steps, two rewards of 1e308 or more and a KL.
    assert "metrics.jsonl: 7 step(s) or value(s) are no number that a run can have" in html
    assert "metrics.jsonl: 2 line(s) are not JSON" in html


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e200", "1" + "0" * 400, "true", '"x"', "[]"])
def test_odd_numbers_in_a_summary(tmp_path: Path, number: str) -> None:
    folder = make_run(tmp_path / "run")
    text = json.dumps(make_summary())
    for old in ("0.447", "0.02", "200", "100.0", "1000", "4000", "0.625"):
        folder.summary.write_text(text.replace(old, number))
        assert Page(render(folder)).open == []
    folder.config.write_text(f"training: {{steps: {number}}}")
    assert Page(render(folder)).open == []


def test_fields_of_a_megabyte_do_not_make_the_page_long(tmp_path: Path) -> None:
    long = "<x>" * 350_000
    group = make_group(long, (long, long), question=long)
    folder = make_run(tmp_path / "run", groups=[group])
    lines = []
    for line in folder.rollouts.open():
        record = json.loads(line)
        many = {f"{i}{long[:1000]}": 0.5 for i in range(2000)}
        lines.append(
            record | {"options": [long[:5000]] * 500, "answer": long, "category": long, "notes": many, "parts": many}
        )
    folder.rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = make_summary()
    summary["versions"] |= {f"{i}{long[:1000]}": long[:1000] for i in range(2000)}
    summary["bad_samples"] |= {f"{i}{long[:1000]}": 1 for i in range(2000)}
    summary["eval_after"]["sets"] |= {f"{i}{long[:1000]}": {"n": long[:1000]} for i in range(500)}
    summary["attention_kernel"] = long
    folder.write_summary(summary)
    folder.config.write_text("x: " + long)
    with folder.metrics.open("a") as file:
        for i in range(100):
            file.write(
                json.dumps({"step": 5, "phase": long[: 1000 + i], f"reward/{i}{long[:9999]}": 1.0, long: 1}) + "\n"
            )
    html = render(folder)
    assert Page(html).open == [] and len(html) < 4_000_000
    assert "1,048,000 more characters in the run's files" in html
    assert "more options in rollouts.jsonl" in html and "more reasons" in html


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for path in (folder.metrics, folder.rollouts, folder.summary, folder.config, folder.bad_samples):
        path.unlink()
        path.mkdir()
    html = render(folder)
    assert Page(html).open == []
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json", "config.yaml"):
        assert f"{name} cannot be read" in html


def test_a_picture_outside_the_run_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (tmp_path / "secret.jpg").write_bytes(b"secret bytes")
    lines = [dict(json.loads(line), thumbnails="thumbnails/../../secret.jpg") for line in folder.rollouts.open()]
    folder.rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = render(folder)
    assert "lies outside the run" in html
    assert "c2VjcmV0" not in html


def test_the_same_question_is_shown_early_and_late(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    sides = re.findall(r"<h4>step (\d+)", render(folder))
    assert sides == ["1", "3"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run's folder\. One holds config\.yaml.*Give the folder"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="is not a run's folder"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
