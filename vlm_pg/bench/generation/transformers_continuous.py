"""transformers' continuous batching: paged keys and values, a prompt's full blocks shared by its responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch

from vlm_pg.bench.case import best_attention, set_attention
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.generation.case import Generate, GenerationCase
from vlm_pg.bench.work import CONTINUOUS_TOKENS

# transformers' own default; a block holds this many tokens.
BLOCK_TOKENS = 256
POLL_SECONDS = 1.0


@contextmanager
def session(case: GenerationCase) -> Iterator[Generate]:
    attention = best_attention(case)
    set_attention(case, attention)
    try:
        manager = _start(case, cache_options(case, case.device.type, attention != "sdpa"))
    except (ValueError, MemoryError, ImportError, torch.OutOfMemoryError) as error:
        raise CannotRun(f"{type(error).__name__}: {error}") from error
    try:
        if case.device.type == "cuda":
            rehearse(manager, case)
        yield lambda new_tokens: _generate(manager, case, new_tokens)
    except BaseException:
        # Requests may be left that nobody will fetch; an ordinary stop would compute them to their end.
        manager.stop(block=True, hard_stop=True)
        raise
    else:
        manager.stop(block=True)
    finally:
        manager.destroy()


def blocks_needed(prefix: int, generations: int, new_tokens: int, groups: int) -> int:
    """Blocks that hold all groups: what a prompt's responses share once, and every response's own.

    A prompt is forked before its last token, so ``(prefix - 1) // 256`` blocks are shared, and a response owns
    ``ceil(((prefix - 1) % 256 + new_tokens) / 256)``. One block a response more lets more of them into a step.
    """
    shared, rest = divmod(prefix - 1, BLOCK_TOKENS)
    own = -(-(rest + new_tokens) // BLOCK_TOKENS)
    return groups * (shared + generations * (own + 1))


def cache_options(case: GenerationCase, device_type: str, flash: bool) -> dict[str, Any]:
    """Size of the cache, and what else bounds how many rollouts decode together, as ContinuousBatchingConfig takes it.

    ``flash``: the model attends with flash-attn. Otherwise the scheduler lets the requests of a step read no more
    tokens than the cache has room for, each of them its whole length, shared blocks or not. On a GPU the cache is made
    so large that all rollouts fit into a step. On a CPU it holds what is needed and no more, and some rollouts take
    turns, which is faster there: attention runs over a mask of [tokens of a step, tokens that the step reads], so a
    step costs the square of its requests.
    """
    groups, prefix = case.prompts.shape
    blocks = blocks_needed(prefix, case.generations, case.new_tokens, groups)
    if device_type == "cpu":
        return {"num_blocks": blocks, "max_batch_tokens": max(CONTINUOUS_TOKENS, case.rollouts)}
    per_request = -(-(prefix + case.new_tokens) // BLOCK_TOKENS)
    # The default margin holds prompts back while less than 15 % of the cache is free.
    options: dict[str, Any] = {"safety_margin": 0.0}
    if flash:
        # As transformers does where it is told the lengths: an even number, one more than a request fills.
        return options | {"num_blocks": blocks, "max_blocks_per_request": 2 * -(-(per_request + 1) // 2)}
    return options | {"num_blocks": max(blocks, case.rollouts * per_request)}


def rehearse(manager: Any, case: GenerationCase) -> None:
    """Generate for other prompts of the same shape, so that CUDA graphs are captured; their blocks are freed again.

    Raises:
        CannotRun: this transformers cannot free them (5.17 cannot).
    """
    if not hasattr(manager, "pause"):
        raise CannotRun(
            f"the continuous batching of transformers {version('transformers')} cannot be paused to free the blocks of "
            "its rehearsal; install a later one"
        )
    _generate(manager, case.other(seed=1), case.new_tokens)
    with manager.pause():
        manager.batch_processor.cache.evict_cached_blocks()


def _start(case: GenerationCase, options: dict[str, Any]) -> Any:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Not through the constructor: it refuses several greedy sequences, which this engine can do (a prompt is forked).
    config = GenerationConfig(max_new_tokens=case.new_tokens, do_sample=False, eos_token_id=-1)
    config.num_return_sequences = case.generations
    if any(field.name == "auto_switch_to_flash" for field in fields(ContinuousBatchingConfig)):
        # Everybody runs with the attention that `best_attention` chose.
        options = options | {"auto_switch_to_flash": False}
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
