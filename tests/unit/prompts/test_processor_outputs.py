"""Prompts made of a Hugging Face processor's outputs, for users who build their own."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import make_case, tiny_policy
from vlm_pg.prompts.processor_outputs import prompt_from_processor


def test_several_videos_bring_their_seconds_as_a_tensor() -> None:
    policy = tiny_policy()
    text = policy.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, {"type": "video"}, {"type": "text", "text": "Which?"}]}],
        add_generation_prompt=True,
        tokenize=False,
    )
    videos = [torch.zeros(4, 3, 28, 28, dtype=torch.uint8), torch.zeros(6, 3, 56, 28, dtype=torch.uint8)]
    metadata = [{"fps": 2.0, "frames_indices": list(range(len(v))), "total_num_frames": len(v)} for v in videos]
    inputs = policy.processor(
        text=[text],
        videos=videos,
        video_metadata=metadata,
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    inputs["second_per_grid_ts"] = torch.as_tensor(inputs["second_per_grid_ts"])
    prompt = prompt_from_processor(inputs, policy.positions)
    assert prompt.media_kinds == ("video", "video")
    assert prompt.grid_thw.tolist() == [[2, 2, 2], [3, 4, 2]]


def test_media_keep_their_order_of_appearance() -> None:
    policy = tiny_policy()
    prompt = make_case(policy, "image+video", seed=4).prompt
    kinds = [kind for kind in prompt.mm_token_type_ids.unique_consecutive().tolist() if kind]
    assert [{"image": 1, "video": 2}[kind] for kind in prompt.media_kinds] == kinds
    assert prompt.pixel_values.shape[0] == int(prompt.grid_thw.prod(-1).sum())


def test_a_batch_of_conversations_is_refused() -> None:
    with pytest.raises(ValueError, match="one conversation"):
        prompt_from_processor({"input_ids": torch.zeros(2, 5)}, lambda *_: torch.zeros(3, 5))
