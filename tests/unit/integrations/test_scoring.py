"""Another trainer's model is scored with its own output head and at the positions of its own forward."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.groups import make_case, random_group
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.integrations.padded import group_rows
from vlm_pg.integrations.scoring import GroupedScorer


def test_a_head_in_fp32_behind_a_model_in_bf16() -> None:
    """Rows in chunks and all at once: logits in fp32, and gradients that differ in the order of sums alone."""
    model = tiny_model("qwen2_5_vl", tie_word_embeddings=False).to(torch.bfloat16)
    model.lm_head.float()
    scorer = GroupedScorer(model, tiny_processor("qwen2_5_vl"), fp32_head=True)
    case = make_case(scorer.policy, "text", seed=1)
    group = random_group(scorer.policy, case, [5, 4], seed=1)
    found = []
    for rows in (100, 4):
        scorer.policy.logits_chunk_rows = rows
        logprobs = scorer(model, [group], 1.0).logprobs
        (grad,) = torch.autograd.grad(logprobs.sum(), model.lm_head.weight)
        assert grad.dtype == torch.float32
        found.append((logprobs, grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_positions_are_those_of_the_model_it_is_given() -> None:
    model = tiny_model("qwen2_5_vl")
    scorer = GroupedScorer(model, tiny_processor("qwen2_5_vl"))
    types = torch.tensor([0, 0] + [2] * 40 + [0] * 3)
    given: tuple[Any, ...] = (torch.zeros_like(types), types, torch.tensor([[40, 2, 2]]))
    positions = scorer.policy.positions(*given, ("video",), (1.0,))
    own, _ = model.model.get_rope_index(given[0][None], types[None], None, given[2], [1.0])
    assert torch.equal(positions, own[:, 0]) and positions[0, -3:].tolist() == [3, 4, 5]
    assert scorer.policy.positions(*given, ("video",), (1.0,), rule="qwen")[0, -3:].tolist() == [81, 82, 83]


def test_a_row_that_ends_in_an_image_goes_on_as_the_models_forward_does() -> None:
    """Two rows of one prompt whose last token is the image's, wider than high; the response is at 2 + its width."""
    model = tiny_model("qwen2_5_vl").eval()
    scorer = GroupedScorer(model, tiny_processor("qwen2_5_vl"))
    image, start = model.config.image_token_id, model.config.vision_start_token_id
    ids = torch.tensor([[20, start, *[image] * 6, 30, 31, 32], [20, start, *[image] * 6, 40, 41, 42]])
    types = (ids == image).long()
    pixels, grids = torch.rand(2 * 24, 3 * 2 * 14 * 14), torch.tensor([[1, 4, 6]] * 2)
    pixels[24:] = pixels[:24]
    rows = group_rows(ids, torch.ones_like(ids), 3, scorer.policy.positions, types, pixels, grids, [1, 1])
    assert len(rows.groups) == 1 and rows.groups[0].prompt.next_position == 5
    ours = rows.scatter(scorer(model, rows.groups, 1.0)[0])
    logits = model(input_ids=ids, mm_token_type_ids=types, pixel_values=pixels, image_grid_thw=grids).logits[:, -4:-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, -3:, None])[:, :, 0]
    assert (ours - expected).abs().max() < 1e-5
