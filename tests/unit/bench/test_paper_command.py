"""``vlm-pg bench paper`` from the command line, on small models; counts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_pg.bench.paper.command import checked, parser
from vlm_pg.bench.paper.devices import DEVICES
from vlm_pg.bench.paper.models import config_of, known_models
from vlm_pg.bench.paper.plan import Model, specifications
from vlm_pg.bench.paper.table import seconds_words
from vlm_pg.bench.shapes import PUBLISHED
from vlm_pg.cli import main
from vlm_pg.errors import ConfigError

pytestmark = pytest.mark.usefixtures("thawed")

# Model small: hidden 256, 4 layers, 4 query and 2 key-value heads of 64, MLPs of 704, 4,096 tokens.
LAYER_WEIGHTS = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704
LAYERS, HEADS, HEAD_DIM, HEAD_WEIGHTS = 4, 4, 64, 256 * 4096


def _run(arguments: list[str], out: Path) -> dict[str, dict[str, object]]:
    assert main(["bench", "paper", "--models", "small", "--jobs", "1", *arguments, "--out", str(out)]) == 0
    return {entry["contestant"]: entry for entry in json.loads(out.read_text())["entries"]}


def test_an_update_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contestants = ["--contestants", "transformers-batch", "transformers-sequential"]
    table = tmp_path / "table.md"
    words = ["--works", "step", "--points", "48,2,16", *contestants, "--markdown", str(table)]
    found = _run(words, tmp_path / "paper.json")
    (entry, one_by_one), rows, length = found.values(), 2, 48 + 16 - 1
    # Forward, and twice as much backward; logits of response tokens alone; pairs below the diagonal, 4 FLOPs a pair and
    # number of a head forward, 10 backward.
    products = 3 * 2 * (rows * length * LAYERS * LAYER_WEIGHTS + rows * 16 * HEAD_WEIGHTS)
    pairs = rows * length * (length + 1) // 2
    for one in (entry, one_by_one):
        assert one["counts"]["flops"]["matmul"] == products
        assert one["counts"]["flops"]["attention"] == 14 * pairs * HEADS * HEAD_DIM * LAYERS
    assert one_by_one["counts"]["launches"] > entry["counts"]["launches"]
    assert entry["weights_bytes"] > 2 * (LAYERS * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS)
    assert set(entry["counts"]["bytes"]) == {"matmul", "attention", "elementwise", "reduction", "copy"}
    assert entry["roofline"]["H100 SXM"]["fits"] is True
    expected = seconds_words(entry["roofline"]["H100 SXM"]["expected_seconds"])
    assert f"launches, ~{expected}" in table.read_text() and "Counted, not measured" in table.read_text()
    assert "transformers-batch" in capsys.readouterr().out


def test_few_layers_give_the_counts_of_the_whole(tmp_path: Path) -> None:
    words = ["--works", "step", "--points", "32,2,8", "--contestants", "grouped"]
    whole = _run(words, tmp_path / "whole.json")["grouped"]
    few = _run([*words, "--few-layers"], tmp_path / "few.json")["grouped"]
    assert few["layers_counted"] == [2, 3] and few["counts"] == whole["counts"]
    assert few["peak_bytes"] <= whole["peak_bytes"]


def test_liger_and_an_adapter(tmp_path: Path) -> None:
    words = ["--works", "step", "--points", "32,2,8", "--contestants", "grouped", "--few-layers"]
    plain = _run(words, tmp_path / "plain.json")["grouped"]
    fused = _run([*words, "--liger"], tmp_path / "fused.json")["grouped"]
    adapted = _run([*words, "--lora", "4"], tmp_path / "adapted.json")["grouped"]
    # The same products in fewer kernels, which move less.
    assert fused["counts"]["flops"] == plain["counts"]["flops"]
    assert fused["counts"]["launches"] < plain["counts"]["launches"]
    assert fused["counts"]["bytes"]["elementwise"] < plain["counts"]["bytes"]["elementwise"]
    # The adapter's weights come on top, and in the end gradients are of them alone.
    assert adapted["weights_bytes"] > plain["weights_bytes"]
    assert 10 * adapted["end_bytes"] < plain["end_bytes"]


def test_the_help_names_every_model() -> None:
    words = " ".join(parser().format_help().split())
    assert all(name in words for name in known_models())


def test_decode_steps_by_hand(tmp_path: Path) -> None:
    """70 tokens go beyond one block of 64, so that the rows of ours move once."""
    prefix, rows, new_tokens = 40, 2, 70
    words = ["--works", "rollout", "--rollout-points", f"{prefix},{rows},{new_tokens}"]
    found = _run(words, tmp_path / "paper.json")
    theirs, ours = found["transformers-generate"]["parts"], found["ours"]["parts"]
    assert "CUDA graphs" in found["transformers-continuous"]["not_counted"]
    # Each of 69 steps puts its rows through all layers and the head; its attention meets the prompt and t tokens.
    products = 2 * rows * (new_tokens - 1) * (LAYERS * LAYER_WEIGHTS + HEAD_WEIGHTS)
    pairs = rows * sum(prefix + token for token in range(1, new_tokens))
    assert theirs["steps"]["flops"]["matmul"] == ours["steps"]["flops"]["matmul"] == products
    assert theirs["steps"]["flops"]["attention"] == 4 * pairs * HEADS * HEAD_DIM * LAYERS
    # The host looks at the device once a token.
    assert sum(ours["steps"]["waits"].values()) == new_tokens - 1
    # The prompt once; of its last layer only the row that is read goes through the MLP, but never more than all.
    assert ours["prefill"]["flops"]["matmul"] < theirs["prefill"]["flops"]["matmul"] / 1.5
    assert found["ours"]["replays"] == dict.fromkeys(DEVICES, new_tokens - 1)
    assert found["ours"]["captured_launches"] > 0
    # The engine prefills on fused kernels; steps until a graph is recorded are launched one by one.
    assert {"silu_mul", "rms_norm"} <= ours["prefill"]["launches_by_operation"].keys()
    assert 0 < found["ours"]["eager_steps"] < new_tokens - 1
    assert found["ours"]["captured_launches"] < ours["steps"]["launches"]


def test_a_configuration_of_the_users_own(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config_of("small").save_pretrained(folder)
    words = ["--models", str(folder), "--works", "step", "--points", "32,2,8", "--contestants", "transformers-batch"]
    mine = _run(words, tmp_path / "mine.json")["transformers-batch"]
    assert mine["model"] == str(folder) and mine["counts"]["flops"]["matmul"] > 0


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3.5-9B"])
def test_published_configurations_have_the_published_shapes(name: str) -> None:
    text, shape = config_of(name).get_text_config(), PUBLISHED[name]
    assert (text.hidden_size, text.num_hidden_layers) == (shape.hidden, shape.layers)
    assert (text.num_attention_heads, text.num_key_value_heads) == (shape.heads, shape.kv_heads)
    assert (text.intermediate_size, text.vocab_size) == (shape.intermediate, shape.vocab)
    assert (list(getattr(text, "layer_types", None) or [])).count("full_attention") in (0, shape.full_layers)


def test_linear_attention_is_counted_from_few_layers_and_prefix_grouper_is_not() -> None:
    model = Model.of("Qwen3.5-9B")
    assert model.layers("step", few=False) == [4, 8] and model.layers("tower", few=True) is None
    arguments = checked(parser().parse_args(["--models", "Qwen3.5-9B", "--works", "step", "--points", "64,2,8"]))
    reasons = {spec["contestant"]: spec.get("not_counted", "") for spec in specifications(arguments)}
    assert "linear-attention layers" in reasons["prefix-grouper-kind"] and not reasons["grouped"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "/no/such"], "neither a folder with config.json nor one of Qwen2.5-VL-7B"),
        (["/no/such"], "neither a folder with config.json nor one of Qwen2.5-VL-7B"),
        (["--grpo-points", "63,8,512"], "an even number of frames"),
        (["--points", "4096,8"], "such as 4096,8,512"),
        (["--lora", "0"], "at least 1"),
        (["--jobs", "0"], "at least 1 process"),
        (["--launch-us", "-1"], "0 microseconds or more"),
        (["--works", "rollout", "--contestants", "grouped"], "None of --contestants has a part"),
    ],
)
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "paper.json"
    there.write_text("mine")
    assert main(["bench", "paper", "--out", str(there)]) == 2
    assert "exists" in capsys.readouterr().err and there.read_text() == "mine"


def test_checked_raises_for_points() -> None:
    with pytest.raises(ConfigError, match="GROUPS"):
        checked(parser().parse_args(["--rollout-points", "1"]))
