"""Objectives sft and dpo equal TRL's SFTTrainer and DPOTrainer: loss and every gradient of a step on the same records.

TRL 1.16 takes images, not videos; videos are compared with transformers' model in test_supervised.py and
test_preferences.py. Its completions end behind the newline that Qwen's template writes after a turn, which no model
samples: here the template writes it before the next turn instead, so both train on the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from tests.support.runs import write_config  # noqa: E402
from tests.support.short_run import train_here  # noqa: E402
from tests.support.tiny import tiny_model, tiny_processor  # noqa: E402
from vlm_pg.training.engines import TorchEngine  # noqa: E402

# As tests.support.tiny's, with the turns' newlines in front, and marks around what the assistant writes.
TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string "
    "else message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{% for part in parts %}{{ part['text'] }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{% for part in parts %}{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
ANSWERS = ("red, green, blue", "It turns to the left.", "How many times? Twice, in the video.")
LATER = ("Which is the first one?", "The first one is red.")


def records(folder: Path, side: int, conversations: bool) -> list[dict[str, Any]]:
    """``side``: of a visual token in pixels, so that nothing is resized; 0: without images."""
    rng = np.random.default_rng(0)
    found = []
    for number, answer in enumerate(ANSWERS):
        record: dict[str, Any] = {"problem_id": number, "problem": f"What happens {'in the picture ' * number}?"}
        record |= {"data_type": "text", "path": ""}
        if side:
            picture = rng.integers(0, 256, (2 * side, 3 * side, 3), dtype=np.uint8)
            Image.fromarray(picture).save(folder / f"{number}.png")
            record |= {"data_type": "image", "path": f"{number}.png"}
        found.append(record | {"turns": [answer, *(LATER if conversations else ())]})
    return found


def their_rows(folder: Path, rows: list[dict[str, Any]], conversations: bool) -> Any:
    found = []
    for row in rows:
        contents = [row["problem"], *row["turns"]]
        messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]
        one: dict[str, Any] = {"messages": messages}
        if not conversations:
            one = {"prompt": messages[:1], "completion": messages[1:]}
        if row["path"]:
            one["images"] = [Image.open(folder / row["path"])]
        found.append(one)
    return datasets.Dataset.from_list(found)


def our_step(
    folder: Path, family: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metrics and gradients of one step of a run on ``rows``."""
    (folder / "records.json").write_text(json.dumps(rows))
    found: list[dict[str, torch.Tensor]] = []
    step = TorchEngine.step

    def recorded(engine: TorchEngine, learning_rate: float) -> float:
        found.append({name: weight.grad.clone() for name, weight in engine._named if weight.grad is not None})
        return step(engine, learning_rate)

    monkeypatch.setattr(TorchEngine, "step", recorded)
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(save_model(folder, family)), "train": ["language"]},
        "data": {"train": str(folder / "records.json")},
        "media": {"workers": 0, "min_pixels": 3136},
        "rollout": {"max_new_tokens": 120},
        "training": {"steps": 1, "prompts_per_step": len(rows), "max_grad_norm": 1e9},
        "observe": {"report": False, "trackers": []},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    ended = train_here(write_config(folder / "run.yaml", values))
    assert ended.code == 0, ended.printed
    return json.loads((folder / "run" / "metrics.jsonl").read_text()), found[0]


def save_model(folder: Path, family: str) -> Path:
    """The tiny model with the template above."""
    path = folder / "model"
    if not path.exists():
        processor = tiny_processor(family)
        processor.chat_template = TEMPLATE
        tiny_model(family).save_pretrained(path)
        processor.save_pretrained(path)
    return path


def their_step(trainer_class: Any, folder: Path, family: str, args: Any, rows: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step of a trainer of TRL."""
    found: dict[str, torch.Tensor] = {}

    class Recorded(trainer_class):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            found["loss"] = super().training_step(model, inputs, num_items_in_batch)
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            return found["loss"]

    processor = tiny_processor(family)
    processor.chat_template = TEMPLATE
    Recorded(str(save_model(folder, family)), args=args, train_dataset=rows, processing_class=processor).train()
    return found


def arguments(folder: Path, size: int, **others: Any) -> dict[str, Any]:
    """Of a config of TRL."""
    return {
        "output_dir": str(folder / "trl"), "per_device_train_batch_size": size, "max_steps": 1, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": None,
        "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"}, "max_grad_norm": 0.0, **others,
    }  # fmt: skip


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 1e-4 * theirs[name].norm().clamp_min(1e-6), name


@pytest.mark.parametrize(
    "family, with_images, conversations",
    [
        ("qwen2_5_vl", True, False),
        ("qwen3_vl", True, False),
        ("qwen2_5_vl", True, True),
        ("qwen2", False, False),
        ("qwen3", False, True),
    ],
)
def test_a_supervised_step_equals_trls(
    family: str, with_images: bool, conversations: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = 32 if family == "qwen3_vl" else 28
    rows = records(tmp_path, side if with_images else 0, conversations)
    parts = ["tower", "merger", "language"] if with_images else ["language"]
    sections: Any = {"model": {"train": parts}, "training": {"objective": "sft"}}
    line, ours = our_step(tmp_path, family, rows, monkeypatch, **sections)
    only = {"assistant_only_loss": conversations, "completion_only_loss": False if conversations else None}
    args = trl.SFTConfig(**arguments(tmp_path, len(rows), **only))
    theirs = their_step(trl.SFTTrainer, tmp_path, family, args, their_rows(tmp_path, rows, conversations))
    assert line["loss"] == pytest.approx(theirs["loss"].item(), rel=1e-5)
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    "family, with_images, loss",
    [
        ("qwen2_5_vl", True, "sigmoid"),
        ("qwen2_5_vl", True, "ipo"),
        ("qwen3_vl", True, "sigmoid"),
        ("qwen2", False, "ipo"),
    ],
)
def test_a_preference_step_equals_trls(
    family: str, with_images: bool, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a reference of its own: at the starting point all pairs have the margin 0."""
    side = 32 if family == "qwen3_vl" else 28
    rows = records(tmp_path, side if with_images else 0, False)
    rows = [row | {"rejected": f"{ANSWERS[i - 1]} {ANSWERS[i]}"} for i, row in enumerate(rows)]
    reference = tiny_model(family, seed=1).requires_grad_(False)
    reference.save_pretrained(tmp_path / "reference")
    processor = tiny_processor(family)
    processor.chat_template = TEMPLATE
    processor.save_pretrained(tmp_path / "reference")
    preference = {"loss": loss, "beta": 0.3, "reference": str(tmp_path / "reference")}
    parts = ["tower", "merger", "language"] if with_images else ["language"]
    sections: Any = {"model": {"train": parts}, "training": {"objective": "dpo"}, "preference": preference}
    line, ours = our_step(tmp_path, family, rows, monkeypatch, **sections)
    assert "preference/margin" in line

    class WithReference(trl.DPOTrainer):  # type: ignore[name-defined,misc]
        def __init__(self, model: str, **others: Any):
            super().__init__(model, ref_model=reference, **others)

    theirs_rows = their_rows(tmp_path, rows, False).rename_column("completion", "chosen")
    rejected = [[{"role": "assistant", "content": row["rejected"]}] for row in rows]
    theirs_rows = theirs_rows.add_column("rejected", rejected)
    args = trl.DPOConfig(**arguments(tmp_path, len(rows), loss_type=[loss], beta=0.3))
    theirs = their_step(WithReference, tmp_path, family, args, theirs_rows)
    assert line["loss"] == pytest.approx(theirs["loss"].item(), rel=1e-5)
    assert_same(ours, theirs)
