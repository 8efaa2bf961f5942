"""transformers' continuous batching: paged keys and values, a prompt's full blocks shared by its responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vlm_pg.bench.contestants.base import best_attention, set_attention
from vlm_pg.bench.generation.base import CannotRun, Generate, GenerationCase
from vlm_pg.bench.generation.work import CONTINUOUS_TOKENS

# transformers' own default; a block holds this many tokens.
BLOCK_TOKENS = 256
POLL_SECONDS = 1.0


class TransformersContinuous:
    name = "transformers-continuous"

    def unavailable_because(self, device: torch.device) -> str | None:
        try:
            from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: F401
        except ImportError as error:
            return f"this transformers has no continuous batching: {error}"
        return None

    @contextmanager
    def session(self, case: GenerationCase) -> Iterator[Generate]:
        set_attention(case, best_attention(case))
        try:
            manager = _start(case)
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {error}") from error
        try:
            yield lambda new_tokens: _generate(manager, case, new_tokens)
        finally:
            manager.stop(block=True)
            manager.destroy()


def blocks_needed(prefix: int, generations: int, new_tokens: int, groups: int) -> int:
    """Blocks for all groups: a prompt's full ones once, and every response's own from the block it branches off in.

    Two blocks a response more, because room is asked for ahead.
    """
    own = -(-(prefix % BLOCK_TOKENS + new_tokens) // BLOCK_TOKENS)
    return groups * (prefix // BLOCK_TOKENS + generations * (own + 2))


def _start(case: GenerationCase) -> Any:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Not through the constructor: it refuses several greedy sequences, which this engine can do (a prompt is forked).
    config = GenerationConfig(max_new_tokens=case.new_tokens, do_sample=False, eos_token_id=-1)
    config.num_return_sequences = case.generations
    groups, prefix = case.prompts.shape
    options: dict[str, Any] = {"num_blocks": blocks_needed(prefix, case.generations, case.new_tokens, groups)}
    if case.device.type == "cpu":
        # Without flash attention it builds a mask of [tokens a pass, tokens in the cache]: smaller passes cost less.
        options["max_batch_tokens"] = max(CONTINUOUS_TOKENS, case.rollouts)
    manager = case.model.init_continuous_batching(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**options)
    )
    manager.warmup()
    manager.start()
    return manager


def _generate(manager: Any, case: GenerationCase, new_tokens: int) -> torch.Tensor:
    requests = manager.add_requests(case.prompts.tolist(), max_new_tokens=new_tokens)
    found: dict[str, list[int]] = {}
    while len(found) < case.rollouts:
        result = manager.get_result(timeout=POLL_SECONDS)
        if result is None:
            if not manager.is_running():
                raise CannotRun(f"its thread ended: {manager.background_thread_status.fatal_error!r}")
        elif result.error is not None:
            raise CannotRun(f"a request failed: {result.error}")
        elif result.is_finished():
            found[result.request_id] = result.generated_tokens
    rows = [row for name in requests for row in _names(name, case.generations)]
    return torch.tensor([found[row] for row in rows])


def _names(request: str, count: int) -> list[str]:
    """A request and its forks, as transformers names them."""
    return [request, *(f"{request}__child#{index}" for index in range(count - 1))]
