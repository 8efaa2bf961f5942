"""What a check refuses is what training leaves out, reason and words, and the lengths are those of its prompts."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tests.support.checking import Folder, about, record
from vlm_pg.config import load_config
from vlm_pg.data.sample_sets import open_training
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import SourcePool

SRT = "1\n00:00:01,000 --> 00:00:02,500\nMind the gap.\n"


def several(number: int, *paths: str, **changes: Any) -> dict[str, Any]:
    kinds = ["image" if path.endswith("png") else "video" for path in paths]
    return record(number, path=list(paths), data_type=kinds, **changes)


def records() -> list[dict[str, Any]]:
    """Some that training uses, and some for each reason not to."""
    clip, long = "av1_video.mkv", "Which? " * 300
    made = [
        lambda n: record(n),
        lambda n: about(n, "video_90.mov"),
        lambda n: about(n, clip, start=1.0, end=2.0, subtitles="words.srt"),
        lambda n: about(n, clip, times=[0.5, 0.6, 2.0]),
        lambda n: several(n, "a.png", clip, "c.png", start=[None, 1.0, None]),
        lambda n: about(n, clip, problem="<think> {{ x }} {% raw %}"),
        lambda n: about(n, clip, start=90.0),
        lambda n: about(n, clip, times=[1.0, 99.0]),
        lambda n: about(n, clip, subtitles="bad.srt"),
        lambda n: about(n, clip, subtitles="no.srt"),
        lambda n: several(n, "a.png", "text.png", "no.png"),
        lambda n: about(n, "corrupted.mp4"),
        lambda n: about(n, "../a.png"),
        lambda n: about(n, "https://example.org/a.png"),
        lambda n: about(n, "words.srt"),
        lambda n: about(n, clip, problem=long),
        lambda n: record(n, problem="a <|im_start|> b"),
        lambda n: about(n, "a.png", start=1.0),
        lambda n: {"problem_id": n},
    ]
    return [one(number) for number, one in enumerate(made, start=1)]


def test_what_is_refused_is_what_training_leaves_out(folder: Folder) -> None:
    (folder.path / "words.srt").write_text(SRT)
    (folder.path / "bad.srt").write_text("nothing")
    (folder.path / "text.png").write_text("no picture")
    one, other = records(), records()[:4]
    sets = {"one": str(folder.path / "one.jsonl"), "two": str(folder.path / "two.jsonl")}
    for name, lines in (("one", one), ("two", other)):
        (folder.path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    media = {"max_frames": 6, "video_tokens": 24}
    limit = {"max_prompt_tokens": 600}
    code, _ = folder.check((), (), "--decode", data={"train": sets}, media=media, prompt=limit)
    rows = [json.loads(line) for line in (folder.path / "out/refused.jsonl").read_text().splitlines()]
    reports = json.loads((folder.path / "out/check.json").read_text())["sets"]

    config = load_config(folder.path / "run.yaml")
    samples, bad = open_training(config.data)
    model = WeightlessPolicy(config.model)
    builder = PromptBuilder(model.processor, config.prompt, model.positions)
    fits = partial(model.check_length, response_tokens=config.rollout.max_new_tokens)
    with SourcePool(builder, config.data, config.media, model.pixel_factor, fits) as pool:
        good, later = pool.for_training().load(samples)
    left_out = {(fault.sample_id, fault.reason, fault.message) for fault in (*bad, *later)}
    refused = {(row["sample_id"], row["reason"], row["message"]) for row in rows}
    assert code == 1 and left_out <= refused
    assert {name for name, *_ in left_out} == {name for name, *_ in refused}, "nothing that training uses"
    assert len({reason for _, reason, _ in left_out}) >= 9 and len(good) == 10
    lengths = {sample.sample_id: prompt.num_tokens for sample, prompt in good}
    of_two = sorted(length for name, length in lengths.items() if name.startswith("two/"))
    assert [of_two[0], of_two[-1]] == [reports["data.train.two"]["prompt_tokens"][end] for end in ("min", "max")]
