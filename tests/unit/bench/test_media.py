"""``scripts.bench.media`` compares equal frames, says what they cost in each way, and leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.bench import media
from tests.support.clips import Clip, write
from tests.support.processes import ROOT
from tests.support.runs import write_config
from vlm_pg.errors import ConfigError
from vlm_pg.media import frame_cache


def record(number: int, path: str) -> dict[str, object]:
    return {
        "problem_id": number, "problem": "Which?", "data_type": "image" if path.endswith("png") else "video",
        "path": path, "problem_type": "free-form", "options": [], "solution": "<answer>a</answer>",
    }  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from PIL import Image

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    clip = write(Clip("libx264", "mp4", "base", {}), tmp_path)
    Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "a.png")
    records = [record(n, path) for n, path in enumerate([clip.name, "a.png", clip.name, "none.mp4"])]
    (tmp_path / "records.json").write_text(json.dumps(records))
    model = {"path": str(ROOT / "assets/tiny-qwen2_5-vl")}
    data = {"train": str(tmp_path / "records.json")}
    return write_config(tmp_path / "run.yaml", {"model": model, "data": data, "training": {"steps": 1}})


def test_each_way_is_measured_on_each_medium_once(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert media.main([str(config), "media.max_frames=6", "--repeats", "2", "--out", str(out)]) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert [one["frames"] for one in written["media"]] == [4, 1] and written["epoch"]["frames"] == 5
    for one in written["media"]:
        assert all(len(one[unit][way]) == 2 for unit in ("seconds", "cpu_seconds") for way in media.WAYS)
        assert one["entry_bytes"] > 0 and one["file_bytes"] == (tmp_path / one["path"]).stat().st_size
    assert written["epoch"]["gain_seconds"]["decoded"] == 1.0 and written["settings"]["max_frames"] == 6
    assert "an epoch of 2 media, 5 frames" in printed and "left out: none.mp4: missing_media" in printed
    assert all(f"  {way:8} " in printed for way in media.WAYS)
    assert not list((tmp_path / "temporary").glob("vlm_pg_*"))
    # Only media of the records that a run would use.
    limited = tmp_path / "limited.json"
    assert media.main([str(config), "data.limit=1", "--repeats", "1", "--out", str(limited)]) == 0
    found = json.loads(limited.read_text())
    assert [one["path"][-3:] for one in found["media"]] == ["mp4"] and found["left_out"] == []
    with pytest.raises(ConfigError, match=r"out\.json exists. Measurements are not thrown away"):
        media.main([str(config), "--out", str(out)])


def test_other_frames_stop_the_measurement(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media_of = frame_cache.media_of

    def darker(*arguments: Any) -> Any:
        found = media_of(*arguments)
        return replace(found, frames=np.zeros_like(found.frames))

    monkeypatch.setattr(frame_cache, "media_of", darker)
    with pytest.raises(RuntimeError, match=r"by 'new' are not those that decoding gives"):
        media.main([str(config), "--repeats", "1"])


def test_what_cannot_be_measured_is_said(config: Path, tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text(json.dumps([record(1, "none.mp4")]))
    with pytest.raises(ConfigError, match=r"None of the 1 media of .* can be used: .*none.mp4: missing_media"):
        media.main([str(config)])
    with pytest.raises(ConfigError, match="--repeats is 0"):
        media.main([str(config), "--repeats", "0"])
