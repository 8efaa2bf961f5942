"""What lmms-eval hands to its model vlm_pg: settings, generation arguments, messages. Needs no lmms-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.integrations.lmms_requests import Generation, conversation_of, generation_of, model_arguments
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import MediaRef


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, Generation(None, 0.0, 1.0, 0, ())),
        ({"max_new_tokens": 16, "until": ["\n\n"]}, Generation(16, 0.0, 1.0, 0, ())),
        ({"max_gen_toks": 8, "until": "Q:", "num_beams": 1}, Generation(8, 0.0, 1.0, 0, ("Q:",))),
        ({"temperature": 0, "top_p": 0.5, "do_sample": True}, Generation(None, 0.0, 1.0, 0, ())),
        ({"temperature": 0.7, "do_sample": False}, Generation(None, 0.0, 1.0, 0, ())),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20}, Generation(None, 0.7, 0.9, 20, ())),
        ({"do_sample": True, "top_p": None}, Generation(None, 1.0, 1.0, 0, ())),
    ],
)
def test_how_answers_are_generated(arguments: dict[str, Any], wanted: Generation):
    assert generation_of(arguments, "t/test/0") == wanted


def test_what_cannot_be_generated_is_said():
    with pytest.raises(ConfigError, match=r"t/test/0: generation_kwargs\.num_beams is 5"):
        generation_of({"num_beams": 5}, "t/test/0")
    with pytest.warns(UserWarning, match=r"generation_kwargs\.image_aspect_ratio=pad is not used"):
        generation_of({"image_aspect_ratio": "pad"}, "t/test/0")
    with pytest.raises(ConfigError, match="generation_kwargs cannot be used"):
        Generation(8, 0.7, 2.0, 0, ()).settings(RolloutSettings(), 1)


def test_settings_of_a_task():
    base = RolloutSettings(max_new_tokens=99, max_batch_rollouts=7)
    made = Generation(None, 0.7, 0.9, 20, ("Q:",)).settings(base, 3)
    assert (made.num_generations, made.temperature, made.top_p, made.top_k) == (3, 0.7, 0.9, 20)
    assert (made.max_new_tokens, made.stop_strings, made.max_batch_rollouts) == (99, ("Q:",), 7)
    # An answer ends before its stop.
    generation = Generation(8, 0.0, 1.0, 0, ("\nQ:", "END"))
    assert generation.without_stop("B\nQ: next END") == "B"
    assert generation.without_stop("B and so on") == "B and so on"


def test_model_arguments():
    made = model_arguments("m", {"media.frames": "uniform", "media.num_frames": 4, "rollout.memory_gb": 2})
    assert (made.model.path, made.media.num_frames, made.rollout.memory_gb) == ("m", 4, 2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"media.num_frame": 4}, "num_frame"),
        ({"frames": 4}, r"pretrained, device, system_prompt, seed, and settings such as media\.num_frames"),
        ({"rollout.temperature": 0.5}, "The task's generation_kwargs"),
        ({"model.path": "x"}, "Give pretrained=CHECKPOINT"),
        ({"training.steps": 5}, "of the sections model, media, prompt, rollout"),
    ],
)
def test_arguments_that_are_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        model_arguments("m", settings)


def test_messages_become_references_and_texts_in_their_places(tmp_path: Path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "First"},
                {"type": "image", "url": picture},
                {"type": "video", "url": "/clips/1.mp4", "start_time": 1.0, "end_time": 2.5},
                {"type": "image", "url": picture.copy()},
                {"type": "text", "text": "Which?"},
            ],
        },
    ]
    made = conversation_of(messages, tmp_path, "t/test/0")
    assert [part["type"] for part in made.messages[1]["content"]] == ["text", "image", "video", "image", "text"]
    assert made.messages[0]["content"] == [{"type": "text", "text": "Be brief."}]
    first, video, again = made.media
    assert video == MediaRef("video", "/clips/1.mp4", 1.0, 2.5) and first == again, "equal pictures are one file"
    assert np.array_equal(np.asarray(Image.open(first.path)), np.asarray(picture)), "its pixels, without loss"
    # A clip as other tasks name it.
    clip = {"url": "/clips/1.mp4", "video_start": 3.0, "video_end": 4.0}
    [ref] = conversation_of([{"role": "user", "content": [{"type": "video", "url": clip}]}], tmp_path, "t").media
    assert ref == MediaRef("video", "/clips/1.mp4", 3.0, 4.0)


@pytest.mark.parametrize("part", [{"type": "audio", "url": "a.wav"}, {"type": "video", "url": b"bytes"}])
def test_what_cannot_be_shown_is_said(part: dict[str, Any], tmp_path: Path):
    with pytest.raises(VlmPgError, match="t/test/0 shows a part of type"):
        conversation_of([{"role": "user", "content": [part]}], tmp_path, "t/test/0")
