"""Visual features made before a run."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest

from tests.support.small_run import small_run
from vlm_pg.cache.eviction import places
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.config import load_config
from vlm_pg.errors import ConfigError
from vlm_pg.eval.main import evaluate
from vlm_pg.media import frame_cache
from vlm_pg.models.family import Family
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.source_pool import SourcePool
from vlm_pg.training.cache_fill import fill, record_sets
from vlm_pg.types import Prompt


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("run"))


def filled(run: Path, folder: Path, *overrides: str) -> int:
    always = ["data.limit=3", "eval.limit=1", "cache.frames=false", f"cache.folder={folder}"]
    return fill(load_config(run, [*always, *overrides]))


def features(folder: Path) -> list[int]:
    return [place.size for place in places(folder) if place.kind == "features"]


def test_what_does_not_fit_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert filled(run, tmp_path / "all") == 0
    sizes = features(tmp_path / "all")
    assert len(sizes) == 4, "the limits of both sets hold"
    said = capsys.readouterr().out
    assert "features of 3 of 3 media are kept" in said and "thrown out" not in said and "could not" not in said
    for name, limit, kept in (("fewer", 2.5 * max(sizes), 2), ("none", 0.5 * min(sizes), 0)):
        with pytest.warns(UserWarning, match="has no room for more visual features within cache.max_gb"):
            filled(run, tmp_path / name, f"cache.max_gb={limit / 2**30}")
        said = capsys.readouterr().out
        assert f"features of {kept} of 3 media are kept" in said and f"{3 - kept} have no room within cache.ma" in said
        assert len(features(tmp_path / name)) == kept


def test_frames_that_do_not_fit_are_counted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["cache.frames=true", "cache.features=false"]
    filled(run, tmp_path / "all", *options)
    assert "3 of 3 media are kept" in capsys.readouterr().out
    limit = 2.5 * max(place.size for place in places(tmp_path / "all"))
    frame_cache._store.cache_clear()
    with pytest.warns(UserWarning, match="has no room for more frames within cache.max_gb"):
        assert filled(run, tmp_path / "fewer", *options, f"cache.max_gb={limit / 2**30}") == 0
    said = capsys.readouterr().out
    assert "train.jsonl: 2 of 3 media are kept, 0 cannot be used\n1 are not kept: they are URLs, have no room" in said
    assert len(list(places(tmp_path / "fewer"))) == 2


def test_an_adapter_in_the_tower_is_part_of_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a fill makes is what a run with this model finds; the base's features are others."""
    base = str(load_config(run, []).model.path)
    model = load_policy(base).model
    config = peft.LoraConfig(r=2, target_modules=["qkv", "q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    folder = tmp_path / "cache"
    filled(run, folder, f"model.path={tmp_path / 'adapter'}")
    assert "the adapter in model.path reaches into the vision tower, so the whole model is" in capsys.readouterr().out
    of_adapter = {place.key for place in places(folder)}
    policy = load_policy(tmp_path / "adapter")
    keep_features(policy, CacheSettings(folder=folder))
    assert policy.vision.store is not None
    assert policy.vision.store.read(_first_prompt(policy, run)) is not None
    filled(run, folder)
    assert len(of_adapter) == 4 and len(features(folder)) == 8
    assert "so the whole model is loaded" not in capsys.readouterr().out


def _first_prompt(policy: Policy, run: Path) -> Prompt:
    config = load_config(run, [])
    builder = PromptBuilder(policy.processor, config.prompt, policy.positions)
    [records, *_] = record_sets(config)
    with SourcePool(builder, config.data, config.media, policy.pixel_factor, lambda prompt: None) as sources:
        [(_, prompt)], _ = sources.for_records(records.path, records.name).load(records.samples[:1])
    return prompt


def test_what_the_run_never_asks_for_is_not_made(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips = run.parent / "clips"
    sets = f"data.train={{a: {clips / 'train.jsonl'}, b: {clips / 'train.jsonl'}}}"
    weights = ["data.mixture={a: 0, b: 1}", "data.limit=2", "eval.sets=[seen]"]
    more = f"data.eval.more={clips / 'eval_seen.jsonl'}"
    assert filled(run, tmp_path / "cache", "cache.frames=true", sets, more, *weights) == 0
    said = capsys.readouterr().out
    assert "data.mixture: left out are the sets a, whose weight is 0" in said and said.count("train.jsonl: 2 of 2") == 1
    assert "data.limit: only the first 2 usable training records of each set are asked for" in said
    assert "eval.sets: left out are the evaluation sets more" in said and said.count("eval_seen.jsonl: 1 of 1") == 1
    with pytest.raises(ConfigError, match="has no weight for b"):
        filled(run, tmp_path / "cache", sets, "data.mixture={a: 1}")


def test_media_are_asked_for_once_and_by_a_question_that_can_be_used(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = run.parent / "clips"
    lines = [json.loads(line) for line in (clips / "train.jsonl").read_text().splitlines()]
    same = [{**lines[0], "problem_id": f"same-{number}"} for number in range(3)]
    same[0] |= {"problem": "word " * 500}
    broken = clips / "broken.mp4"
    broken.write_bytes(b"nothing")
    gone = {**lines[1], "problem_id": "broken", "path": broken.name}
    text = {**lines[2], "problem_id": "text", "path": "", "data_type": "text"}
    records = clips / "odd.jsonl"
    records.write_text("".join(json.dumps(line) + "\n" for line in (*same, gone, text)))
    calls: list[int] = []
    encode = Family.encode_vision
    monkeypatch.setattr(Family, "encode_vision", lambda *given: calls.append(1) or encode(*given))
    options = [f"data.train={records}", "data.limit=9"]
    assert filled(run, tmp_path / "cache", *options) == 1
    said = capsys.readouterr().out
    assert "odd.jsonl: features of 1 of 2 media are kept (0.000 GiB), 1 of them made now, 1 cannot be used" in said
    assert "\nbroken: " in said and len(calls) == len(features(tmp_path / "cache")) == 2
    assert filled(run, tmp_path / "cache", *options) == 1 and len(calls) == 2, "the other is the evaluation's"
    assert "0 of them made now" in capsys.readouterr().out


OWN = """source: mine
template_by: [answer_kind]
templates: {multiple_choice: "{question}"}
max_prompt_tokens: 1000
max_new_tokens: 2
clips: false
media: {frames: uniform, num_frames: 2}
"""


def test_evaluation_finds_what_was_filled_in_for_its_protocol(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its frames, whole videos in place of clips, and the first of the questions that it asks."""
    clips = run.parent / "clips"
    first, second, *_ = [json.loads(line) for line in (clips / "eval_seen.jsonl").read_text().splitlines()]
    other = {**first, "problem_id": "other", "problem_type": "free-form", "options": []}
    (clips / "clip.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (other, {**first, "start": 0.0, "end": 1.0}, second))
    )
    (tmp_path / "own.yaml").write_text(OWN)
    options = [
        f"run.dir={tmp_path / 'runs' / 'one'}",
        f"data.eval={{seen: {clips / 'clip.jsonl'}}}",
        f"eval.protocols={{seen: {tmp_path / 'own.yaml'}}}",
        "data.train=null",
        "cache.frames=true",
        "eval.limit=1",
    ]
    cache = tmp_path / "cache"
    assert filled(run, cache, *options) == 0
    there = {(place.kind, place.key) for place in places(cache)}
    assert sorted(kind for kind, _ in there) == ["features", "frames"]
    evaluate(load_config(run, [f"cache.folder={cache}", *options]), None)
    assert {(place.kind, place.key) for place in places(cache)} == there
