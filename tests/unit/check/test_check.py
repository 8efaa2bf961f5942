"""Each finding is made by hand in a small set, found, and nothing else is; clean sets have none."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.checking import CLEAN, Folder, Record, about, record
from tests.support.data_sets import write_shards
from tests.support.groups import tiny_policy
from tests.support.processes import ROOT
from vlm_pg import cli
from vlm_pg.check.lengths import LengthRules, PromptLengths, measured
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.records import parse_record, read_records
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.settings import PromptSettings

OWN = """
def half(response):
    return 0.5

def silent(response):
    return None

def counts(num_tokens):
    return float(num_tokens > 5)
"""
OF_SET = """
def of_set(sample):
    return {"two": {"two/1": 1.0}}[sample.dataset][sample.sample_id]
"""


# Records behind the clean ones, by their number; the reason of the finding, "?" for a warning; a piece of the message.
FAULTS: list[tuple[Callable[[int], Record], str, str]] = [
    (lambda n: {"problem_id": n}, "missing_field", "is missing"),
    (lambda n: record(1, problem="Else?"), "duplicate_id", "at train.jsonl:1"),
    (lambda n: about(n, "no.mov"), "missing_media", "no.mov"),
    (lambda n: about(n, "av1_video.mkv", start=90.0, end=99.0), "bad_clip", "90 s to 99 s"),
    (
        lambda n: record(n, problem_type="numerical", options=[], solution="<answer>many</answer>"),
        "unscorable_gold_answer",
        "does not state one number",
    ),
    (lambda n: record(n, options=["A. Red", "B. blue", "C. **red**."]), "equal_options", "A, C"),
    (lambda n: record(n, options=["A. red", "B. blue", "C. 'Blue'"]), "equal_wrong_options?", "B, C"),
    (
        lambda n: about(n, "c.png", problem="<image><image> Which?"),
        "media_mark_without_medium",
        "'<image>' 2 time(s), and the record names 1 image(s)",
    ),
    (
        lambda n: record(n, problem="What does the <video> tag do?"),
        "media_mark_without_medium",
        "One mark where each video stands, or none",
    ),
    (lambda n: record(n, problem="Which? " * 300), "prompt_too_long", "At most 700"),
    (
        lambda n: about(n, "again.mov", problem="Which colour  has lamp 2?"),
        "duplicate_question?",
        "those of train.jsonl:2 (2)",
    ),
    (
        lambda n: about(n, "again.mov", problem="Which colour has lamp 2?", solution="<answer>B</answer>"),
        "contradictory_answer",
        "whose answer is 'A', not 'B'",
    ),
]
GOOD: list[Callable[[int], Record]] = [
    lambda n: about(n, "c.png", problem="Which of <image>?"),
    lambda n: about(n, "av1_video.mkv", start=1.0, end=3.0, problem="Which colour has lamp 3?"),
    lambda n: about(n, "c.png", problem="Which colour has lamp 4?"),
    lambda n: record(n, problem="Which colour has lamp 1?", options=["X", "Y"]),
]


def test_each_fault_is_found_and_nothing_else(folder: Folder) -> None:
    """Another part, another image and other options make another question."""
    made = [make(number) for number, make in enumerate([*GOOD, *(make for make, _, _ in FAULTS)], start=5)]
    code, found = folder.check([*CLEAN, *made], prompt={"max_prompt_tokens": 700})
    expected: dict[str, list[str]] = {}
    for line, (_, reason, _) in enumerate(FAULTS, start=5 + len(GOOD)):
        expected.setdefault(reason, []).append(f"train.jsonl:{line} {1 if reason == 'duplicate_id' else line}")
    assert (code, found) == (1, expected)
    messages = folder.messages()
    assert all(any(piece in message for message in messages) for _, _, piece in FAULTS)


def test_decoding_finds_what_a_look_does_not(folder: Folder) -> None:
    records = [*CLEAN, about(9, "corrupted.mp4")]
    assert folder.check(records)[1].keys() <= {"corrupt_media"}
    code, found = folder.check(records, (), "--decode")
    assert (code, found) == (1, {"corrupt_media": ["train.jsonl:5 9"]})


def test_decoding_fills_the_cache(folder: Folder) -> None:
    cache = {"folder": str(folder.path / "cache")}
    assert folder.check(CLEAN, cache=cache)[0] == 0 and not (folder.path / "cache").exists()
    code, found = folder.check([*CLEAN, about(9, "corrupted.mp4")], (), "--decode", cache=cache)
    assert (code, found) == (1, {"corrupt_media": ["train.jsonl:5 9"]})
    assert len([path for path in (folder.path / "cache/frames").rglob("*") if path.is_file()]) >= 3


def test_what_is_trained_on_is_found_in_evaluation_by_content(folder: Folder) -> None:
    """And once each: a question about a medium that is trained on is no finding of its own."""
    held = [about(1, "again.mov"), about(2, "b.png", problem="Which colour has lamp 4?"), about(3, "c.png")]
    held.append(record(4, problem="Which colour has lamp 1?"))
    code, found = folder.check(CLEAN, held)
    assert code == 1
    assert found == {
        "media_trained_on": ["data.eval.held, held.jsonl:1 1", "data.eval.held, held.jsonl:2 2"],
        "question_trained_on": ["data.eval.held, held.jsonl:4 4"],
    }
    assert "'again.mov' is byte for byte 'video_90.mov' of train.jsonl:2 (2)" in folder.messages()[0]
    report = json.loads((folder.path / "out/check.json").read_text())["sets"]
    assert [report[name]["usable"] for name in ("data.train", "data.eval.held")] == [4, 1]
    assert folder.check(CLEAN, held[2:3]) == (0, {})


@pytest.mark.parametrize(
    ("reward", "found"),
    [
        # beside accuracy a function may say anything but nothing
        ({"functions": [{"function": "half", "weight": 1.0}]}, None),
        ({"functions": [{"function": "silent", "weight": 1.0}]}, "silent None"),
        ({"functions": [{"function": "counts", "weight": 1.0}], "accuracy_weight": 0.0}, None),
        # where accuracy has no weight the function says what is right, in or out of a process of its own
        ({"functions": [{"function": "half", "weight": 1.0}], "accuracy_weight": 0.0}, "half 0.5"),
        ({"functions": [{"function": "half", "weight": 1.0, "isolated": True}], "accuracy_weight": 0.0}, "half 0.5"),
        # a gold answer has no shape, and no judge grades it
        ({"length": {"weight": 1.0}, "judge": {"weight": 1.0, "url": "http://127.0.0.1:9/v1"}}, None),
    ],
)  # fmt: skip
def test_gold_answers_are_scored_by_the_run_s_own_reward(
    folder: Folder, reward: dict[str, Any], found: str | None
) -> None:
    (folder.path / "own.py").write_text(OWN)
    for one in reward.get("functions", ()):
        one["function"] = f"{folder.path / 'own.py'}:{one['function'].rpartition(':')[2]}"
    code, findings = folder.check([record(1)], reward={"accuracy_weight": 1.0, "format_weight": 0.1, **reward})
    assert (code, findings) == ((0, {}) if found is None else (1, {"unscorable_gold_answer": ["train.jsonl:1 1"]}))
    assert found is None or found in folder.messages()[0]


def test_a_judge_that_training_could_not_ask_ends_the_check(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.check([record(1)], reward={"judge": {"weight": 1.0}})[0] == 2
    assert "reward.judge.url is None" in capsys.readouterr().err


def test_a_response_beyond_the_model_s_positions(folder: Folder) -> None:
    assert folder.check([record(1)], rollout={"max_new_tokens": 400})[0] == 0
    limit = json.loads((ROOT / "assets/tiny-qwen2_5-vl/config.json").read_text())
    most = limit.get("text_config", limit)["max_position_embeddings"]
    training = {"steps": 1, "micro_batch_tokens": 10**6}
    code, found = folder.check([record(1)], rollout={"max_new_tokens": most}, training=training)
    assert (code, found) == (1, {"too_long_for_model": ["train.jsonl:1 1"]})


def test_data_under_a_config_limits_and_overrides(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.check(CLEAN)
    (folder.path / "shards").mkdir()
    write_shards(folder.path / "shards", "train", read_records(folder.path / "train.jsonl")[0])
    config = str(folder.path / "run.yaml")
    for data in ("train.jsonl", "shards"):
        words = [str(folder.path / data), config, f"data.media_root={folder.path}"]
        assert cli.main(["check", *words]) == 0
        assert "4 records, 4 usable, 0 not; 3 media" in capsys.readouterr().out
        assert cli.main(["check", *words, "--decode", "prompt.max_prompt_tokens=20"]) == 1
        assert "above the limit of 20" in capsys.readouterr().out
    assert cli.main(["check", config, "data.limit=2"]) == 0
    out = capsys.readouterr().out
    assert "data.limit: only the first 2 usable" in out and "2 records, 2 usable, 0 not; 1 media; 2 more are" in out
    assert cli.main(["check", config, "data.train=null"]) == 2
    assert "Neither data.train nor data.eval is set" in capsys.readouterr().err
    assert cli.main(["check", str(folder.path / "no.jsonl"), config]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_reports(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "<script>alert(1)</script>\x1b[2J"
    records = [*CLEAN, about(9, "no.mov"), about(hostile, "no.mov"), record(11, problem="Which? " * 300)]
    folder.check(records, prompt={"max_prompt_tokens": 700})
    out, page = capsys.readouterr().out, (folder.path / "out/check.html").read_text()
    report = json.loads((folder.path / "out/check.json").read_text())
    one = report["sets"]["data.train"]
    assert (one["records"], one["usable"], one["media"]) == (7, 4, 3)
    assert one["errors"] == {"missing_media": 2, "prompt_too_long": 1} and one["prompts_above_limit"] == 1
    assert one["video_seconds"]["max"] == pytest.approx(5.0, abs=0.1) and one["prompt_tokens"]["max"] > 700
    lengths = [int(found.replace(",", "")) for found in re.findall(r"(?:min|median|p95|max) ([\d,]+),?", out)[:4]]
    assert lengths == list(one["prompt_tokens"].values())
    assert "missing_media" in out and "\x1b" not in out + page and "<script" not in page
    assert "&lt;script&gt;" in page and page.count('class="bar after"') > 4 and not re.search("https?:", page)
    log = BadSampleLog(folder.path / "out/refused.jsonl", 1.0, 1)
    assert log.counts == one["errors"]


def test_the_order_of_findings_is_that_of_the_records(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of processes, and however few records are under way."""
    kinds = (
        lambda n: about(n, "no.mov"),
        lambda n: about(n, "video_90.mov", start=float(n), end=n + 1.0),
        lambda n: about(n, "av1_video.mkv"),
        record,
    )
    records = [kinds[n % 4](n) for n in range(40)] + [record(3, problem="Else?")]
    found = []
    for workers, window, batch in ((2, 3, 2), (0, 1, 1)):
        monkeypatch.setattr("vlm_pg.check.command.WINDOW", window)
        monkeypatch.setattr("vlm_pg.check.command.BATCH", batch)
        folder.check(records, media={"workers": workers})
        found.append((folder.path / "out/refused.jsonl").read_text())
    assert len(set(found)) == 1 and len(found[0].splitlines()) == 21


def test_a_file_is_looked_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlm_pg.media import decode_file

    real, seen = decode_file.probe_file, []

    def counted(kind: Any, path: str, *rest: Any) -> Any:
        seen.append((path, rest[2]))
        return real(kind, path, *rest)

    monkeypatch.setattr(decode_file, "probe_file", counted)
    monkeypatch.setattr("vlm_pg.check.command.WINDOW", 8)  # most are requested when earlier ones are done
    monkeypatch.setattr("vlm_pg.check.command.BATCH", 4)
    records = [about(n, ("./" if n % 2 else "") + "video_90.mov") for n in range(40)]
    records += [about(41, "av1_video.mkv"), about(42, "av1_video.mkv", start=1.0), about(43, "av1_video.mkv")]
    assert folder.check(records, [about(1, "c.png")])[0] == 0
    assert len(seen) == len(set(seen)) == 4


def test_a_file_that_breaks_off_ends_with_a_message(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.check(CLEAN)
    for content, code in (("", 2), ('{"problem_id": 1}\n[1', 2), ("[1]\n", 1)):
        (folder.path / "train.jsonl").write_text(content)
        assert cli.main(["check", str(folder.path / "run.yaml")]) == code
        assert code == 1 or "train.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("in_pool", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_prompts_are_measured_alike_in_processes(in_pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSettings(path=str(ROOT / "assets/tiny-qwen2_5-vl"))
    rules = LengthRules(model, PromptSettings(max_prompt_tokens=120), 8, answer_prefix="Best option:(")
    facts = MediaFacts("x", 2.0, 4, 56, 84, 12, (0.0, 0.5, 1.0, 1.5), 2.0)
    samples = [parse_record(about(n, "a.mp4", problem="Which? " * n)) for n in range(1, 51)]
    questions = [(one, (facts,)) for one in samples]
    monkeypatch.setattr("vlm_pg.check.lengths.IN_PROCESS_PROMPTS", 0 if in_pool else 10**6)
    with PromptLengths(2, WeightlessPolicy(model)) as lengths:
        halves = lengths.start(questions[:7], rules), lengths.start(questions[7:], rules)
        found = [length for half in halves for length in half()]
        assert (lengths._pool is not None) == in_pool
    assert [one.fault is None for one in found].count(False) in range(5, 45)
    assert measured(pickle.dumps(rules), questions) == found


def test_media_for_a_model_of_text_end_the_check(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tiny_policy(family="qwen3")
    for part in (policy.model.config, policy.processor):
        part.save_pretrained(folder.path / "text")
    folder.check([record(1)])
    words = [str(folder.path / "run.yaml"), f"model.path={folder.path / 'text'}", "model.train=[language]"]
    assert cli.main(["check", *words]) == 0
    (folder.path / "train.jsonl").write_text(json.dumps(about(1, "a.png")))
    assert cli.main(["check", *words]) == 2
    assert "reads text alone" in capsys.readouterr().err
    rules = LengthRules(ModelSettings(path=str(folder.path / "text")), PromptSettings(), 8)
    facts = MediaFacts("x", 0.0, 1, 28, 28, 1, (0.0,))
    assert "reads text alone" in str(measured(pickle.dumps(rules), [(parse_record(about(1, "a.png")), (facts,))]))


def test_several_sets_are_checked_each_under_its_name(folder: Folder) -> None:
    """Files of one name in two folders are two media, and ids of two sets may be alike."""
    (folder.path / "more").mkdir()
    (folder.path / "more/a.png").write_bytes((folder.path / "c.png").read_bytes())
    (folder.path / "more/more.jsonl").write_text(json.dumps(about(1, "a.png")) + "\n")
    (folder.path / "first.jsonl").write_text(json.dumps(about(1, "a.png")) + "\n")
    sets = {"one": str(folder.path / "first.jsonl"), "two": str(folder.path / "more/more.jsonl")}
    code, found = folder.check((), [about(7, "c.png")], data={"train": sets})
    assert code == 1 and list(found) == ["media_trained_on"]
    code, found = folder.check(
        (), [about(7, "lost.png")], data={"train": sets, "media_root": {"two": str(folder.path)}}
    )
    assert code == 1 and found == {
        "duplicate_question?": ["data.train.two, more.jsonl:1 two/1"],
        "missing_media": ["data.eval.held, held.jsonl:1 7"],
    }


def test_rewards_see_samples_of_several_sets_as_in_training(folder: Folder) -> None:
    (folder.path / "own.py").write_text(OF_SET)
    for name in ("one", "two"):
        (folder.path / f"{name}.jsonl").write_text(json.dumps(record(1, problem=f"{name}?")) + "\n")
    reward = {"functions": [{"function": f"{folder.path / 'own.py'}:of_set"}]}
    sets = {name: str(folder.path / f"{name}.jsonl") for name in ("one", "two")}
    code, found = folder.check((), (), data={"train": sets}, reward=reward)
    assert (code, found) == (1, {"unscorable_gold_answer": ["data.train.one, one.jsonl:1 one/1"]})
