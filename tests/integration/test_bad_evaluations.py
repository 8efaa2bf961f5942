"""What cannot be evaluated, through the commands: each says what came, what is allowed, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.published.case import Published, lay_out, media
from tests.support.runs import read_lines, save_tiny_model
from tests.support.scored_sets import MODEL, Prepared, config_of, prepare
from vlm_pg.cli import main

pytestmark = pytest.mark.matrix

HEADER = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
VAL = HEADER + "".join(f"{number},60,64,48,what moves,0,0,DO,ball,house,hill,car,road\n" for number in (11, 22, 33))
SET = {"val.csv": VAL, **media(*(f"NExTVideo/{number}.mp4" for number in (11, 22, 33)))}


@pytest.fixture(scope="module")
def nextqa(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("nextqa", tmp_path_factory.mktemp("nextqa"), Published(SET))


def protocol(folder: Path, max_new_tokens: int) -> str:
    path = folder / f"short_{max_new_tokens}.yaml"
    own = {"base": "nextqa/official", "source": "made up", "max_new_tokens": max_new_tokens}
    path.write_text(yaml.safe_dump(own | {"media": {"max_frames": 4, "max_pixels": 37632}}))
    return str(path)


def test_a_folder_of_another_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NExT-QA's files, in folders of somebody's own: what is looked for, what is there, and how to name it."""
    raw = tmp_path / "raw"
    lay_out(raw, {"questions/validation.csv": VAL, "clips/11.mp4": None})
    assert main(["prepare", "nextqa", str(raw), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    for part in (str(raw), "train.csv", "val.csv", "questions", "clips", "--eval"):
        assert part in printed, (part, printed)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_media_in_other_folders_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "raw"
    lay_out(raw, {"val.csv": VAL, **media("NExTVideo/11.mp4", "elsewhere/22.mp4")})
    assert main(["prepare", "nextqa", str(raw), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "1 for evaluation" in printed and "2  missing_media" in printed
    refused = {line["sample_id"]: line["message"] for line in read_lines(tmp_path / "out" / "refused.jsonl")}
    assert set(refused) == {"22_0", "33_0"} and "elsewhere/22.mp4" in refused["22_0"]
    assert "No file of that name is in the root. Fetch it, or correct --media-root." in refused["33_0"]


def test_questions_whose_media_have_gone_are_counted(
    nextqa: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three videos are at the media root that the configuration names; of one only half its bytes."""
    moved = Prepared(nextqa.records, str(tmp_path / "media"))
    whole = (Path(nextqa.media_root) / "NExTVideo" / "11.mp4").read_bytes()
    lay_out(tmp_path / "media", {"NExTVideo/11.mp4": whole, "NExTVideo/22.mp4": whole[: len(whole) // 2]})
    config = config_of(tmp_path, moved, protocol(tmp_path, 2), data={"max_bad_share": 1.0})
    assert main(["eval", "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "2 with bad media" in printed
    out = tmp_path / "runs" / f"eval-{Path(MODEL).name}"
    row = json.loads((out / "result.json").read_text())["sets"]["mine"]
    assert (row["n_total"], row["n_scored"], row["n_bad_media"], row["n"]) == (3, 1, 2, 1)
    bad = {line["sample_id"]: line["reason"] for line in read_lines(out / "bad_samples.jsonl")}
    assert bad == {"22_0": "corrupt_media", "33_0": "missing_media"}
    assert main(["eval", "--config", str(config), "--prompts", "mine"]) == 0
    assert "3 questions, 2 of them cannot be asked" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["unknown", "text"])
def test_a_checkpoint_of_another_family(
    nextqa: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    model = tmp_path / "model"
    if how == "text":
        save_tiny_model(model, "qwen3")
    else:
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    config = config_of(tmp_path, nextqa, protocol(tmp_path, 2))
    assert main(["eval", str(model), "--config", str(config)]) == 2
    printed = capsys.readouterr().err
    if how == "text":
        assert "reads text alone" in printed and "Use a Qwen-VL checkpoint, or leave the media out." in printed
    else:
        assert "Model type 'llama' is not supported; supported are " in printed and "qwen2_5_vl" in printed
        assert "Use a checkpoint of one of these, or register the family" in printed
    assert not list((tmp_path / "runs").glob("*/answers_*"))


def test_a_result_of_another_protocol_is_not_resumed(
    nextqa: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(config_of(tmp_path, nextqa, protocol(tmp_path, 2)))
    assert main(["eval", "--config", config]) == 0
    out = tmp_path / "runs" / f"eval-{Path(MODEL).name}"
    answers = (out / "answers_mine.jsonl").read_bytes()
    # As it stands before it is finished.
    result = json.loads((out / "result.json").read_text())
    (out / "protocol.json").write_text(json.dumps(result["protocol"]))
    (out / "result.json").unlink()
    capsys.readouterr()
    other = ["eval", "--config", config, f"eval.protocols={{mine: {protocol(tmp_path, 3)}}}"]
    assert main(other) == 2
    printed = capsys.readouterr().err
    assert "holds an unfinished evaluation with another protocol" in printed
    assert "protocols.mine.max_new_tokens: 2 then, 3 now" in printed
    assert "Repeat it as it was, or set eval.resume=never, which moves it aside." in printed
    assert (out / "answers_mine.jsonl").read_bytes() == answers
    assert main([*other, "eval.resume=never"]) == 0
    assert "moved it to" in capsys.readouterr().out
    # And where a finished one is compared, the difference is shown.
    assert main(["eval", "--config", config]) == 0
    result = out / "result.json"
    capsys.readouterr()
    again = [f"eval.protocols={{mine: {protocol(tmp_path, 3)}}}"]
    assert main(["eval", "--like", str(result), *again]) in (0, 1)
    assert "not made equal: protocols.mine.max_new_tokens: 2 then, 3 now" in capsys.readouterr().out
