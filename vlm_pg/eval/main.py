"""``vlm-pg eval``: a checkpoint against the evaluation sets of its configuration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.errors import ConfigError, TooManyBadSamples
from vlm_pg.eval.runner import Evaluator, Examinee, table
from vlm_pg.files import write_json_atomic
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import load_policy
from vlm_pg.observe.console import Console
from vlm_pg.observe.quiet import quiet_libraries
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.source_pool import SourcePool
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.threads import use_threads
from vlm_pg.types import Prompt


def evaluate(config: RunConfig, checkpoint: Path | None) -> dict[str, Any]:
    """Evaluate ``checkpoint`` (default: ``model.path``), print the figures, and write them beside the answers.

    Everything lands in ``eval-<checkpoint name>/`` in the checkpoint's run folder (``runs/`` for other models), with
    the number of rollouts and temperature in its name unless greedy: ``result.json`` with the figures and the protocol
    (frames, pixels, sampling), one JSON line of answers per question and set, and the samples that could not be used.

    Raises:
        ConfigError: the configuration names no evaluation sets.
        TooManyBadSamples: no question of a set could be scored; everything is written before.
    """
    if not config.data.eval:
        raise ConfigError(
            "The configuration names no evaluation sets. Add them as data.eval.NAME=PATH, files of prepared records."
        )
    quiet_libraries()
    path = Path(config.model.path) if checkpoint is None else checkpoint
    console = Console(enabled=True)
    folder = _folder(config, path)
    folder.mkdir(parents=True, exist_ok=True)
    start_seconds = time.monotonic()
    use_threads(config.training.torch_threads)
    policy = load_policy(path, settings=config.model)
    console.info(f"model: {path}; attention kernel {policy.kernel.name} (checked: {policy.kernel_error:.0e})")
    console.info(f"positions: {policy.family.describe_positions(config.model.positions)}")
    if line := keep_features(policy, config.cache):
        console.info(line)
    builder = PromptBuilder(policy.processor, config.prompt, policy.positions)
    data = config.data
    log = BadSampleLog(folder / "bad_samples.jsonl", data.max_bad_share, data.min_seen_for_bad_share, console.warn)

    def check(prompt: Prompt) -> None:
        policy.check_length(prompt, config.rollout.max_new_tokens)

    with (
        SourcePool(builder, config.data, config.media, policy.pixel_factor, check, kept=config.cache) as sources,
        Rewarder(config.reward, warn=console.warn) as rewarder,
    ):
        results = Evaluator(config, Examinee(policy, sources, rewarder), console, log).run("answers", folder)
    results["protocol"] = {
        "checkpoint": str(path),
        "positions": config.model.positions,
        "media": config.media.model_dump(mode="json"),
        "eval": config.eval.model_dump(mode="json"),
        "max_new_tokens": config.rollout.max_new_tokens,
        "seconds": round(time.monotonic() - start_seconds, 1),
    }
    write_json_atomic(folder / "result.json", results)
    for line in table(results):
        console.info(line)
    console.info(f"written to {folder}")
    _refuse_unscored(results, folder)
    return results


def _refuse_unscored(results: dict[str, Any], folder: Path) -> None:
    """A script that asks only for the exit code must not take a set without a figure for a measured one."""
    unscored = [name for name, figures in results["sets"].items() if figures["accuracy"] is None]
    if unscored:
        raise TooManyBadSamples(
            f"No question of {', '.join(unscored)} could be scored. The cause of each is in "
            f"{folder / 'bad_samples.jsonl'}, where the questions were usable in the answers beside it. Repair the "
            "data, or leave the set out with eval.sets."
        )


def _folder(config: RunConfig, path: Path) -> Path:
    """Where results go; results under other sampling settings do not overwrite each other."""
    run = Path(config.run.dir)
    home = run if run.resolve() in path.resolve().parents else run.parent
    sampling = config.eval
    suffix = "" if sampling.temperature == 0 else f"-n{sampling.num_generations}-t{sampling.temperature:g}"
    return home / f"eval-{path.name}{suffix}"
