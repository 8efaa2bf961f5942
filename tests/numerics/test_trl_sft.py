"""``training.objective=sft`` equals TRL's SFTTrainer: loss and every gradient of a real step on the same records.

TRL 1.16 takes images, not videos; videos are compared with transformers' model in test_supervised.py. Its completions
end behind the newline that Qwen's template writes after a turn, which no model samples: here the template writes it
before the next turn instead, so both train on the same tokens.
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
def test_a_step_equals_trls(
    family: str, with_images: bool, conversations: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = tiny_processor(family)
    processor.chat_template = TEMPLATE
    tiny_model(family).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    side = 32 if family == "qwen3_vl" else 28
    rows = records(tmp_path, side if with_images else 0, conversations)
    (tmp_path / "records.json").write_text(json.dumps(rows))
    parts = ["tower", "merger", "language"] if with_images else ["language"]

    ours: list[Any] = []
    step = TorchEngine.step

    def recorded(engine: TorchEngine, learning_rate: float) -> float:
        ours.append({name: weight.grad.clone() for name, weight in engine._named if weight.grad is not None})
        return step(engine, learning_rate)

    monkeypatch.setattr(TorchEngine, "step", recorded)
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / "model"), "train": parts},
        "data": {"train": str(tmp_path / "records.json")},
        "media": {"workers": 0, "min_pixels": 3136},
        "rollout": {"max_new_tokens": 120},
        "training": {"objective": "sft", "steps": 1, "prompts_per_step": len(rows), "max_grad_norm": 1e9},
        "observe": {"report": False, "trackers": []},
    }
    ended = train_here(write_config(tmp_path / "run.yaml", sections))
    assert ended.code == 0, ended.printed
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())

    theirs: list[dict[str, torch.Tensor]] = []

    class Recorded(trl.SFTTrainer):  # type: ignore[name-defined,misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            theirs.append(
                {"loss": loss} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
            return loss

    args = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(rows), max_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        assistant_only_loss=conversations, completion_only_loss=False if conversations else None, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"}, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Recorded(
        str(tmp_path / "model"),
        args,
        train_dataset=their_rows(tmp_path, rows, conversations),
        processing_class=processor,
    )
    trainer.train()
    assert line["loss"] == pytest.approx(theirs[0]["loss"].item(), rel=1e-5)
    assert ours[0]
    for name, gradient in ours[0].items():
        expected = theirs[0][name]
        assert (gradient - expected).norm() <= 1e-4 * expected.norm().clamp_min(1e-6), name
