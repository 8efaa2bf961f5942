"""Lines and tables that a run prints: steps with units, sample rollouts, the effect of sharing, progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from vlm_pg.observe.text import one_line, visible
from vlm_pg.types import RolloutGroup

if TYPE_CHECKING:
    import rich.console
    import rich.progress

Values = Mapping[str, float | None]
_COLUMNS = ("question", "gold", "response", "reward", "advantage")
_NUMBERS = {
    "nll": "nll {:.3f} nat",
    "distillation/divergence": "divergence {:.3f} nat",
    "preference/accuracy": "pairs right {:.0%}",
    "preference/margin": "margin {:.3f}",
    "kl": "kl {:.3f}",
    "entropy": "entropy {:.2f} nat",
    "response_tokens_mean": "response {:.1f} tok",
    "tokens_per_second": "{:,.0f} tok/s",
    "step_seconds": "{:.2f} s",
    "idle/trainer": "trainer idle {:.0%}",
    "idle/server": "server idle {:.0%}",
}
# Shares are shown from half a per cent on, counts unless 0.
_TROUBLES = {
    "pruned_share": "of the rollouts pruned",
    "filled_groups": "questions in their place",
    "resampled_groups": "groups sampled for those without spread",
    "truncated_share": "cut off at the length limit",
    "no_value_share": "without a reward value",
}
# Below this, sharing hardly affects a step's time, and the line says which settings to change.
LITTLE_GAIN = 1.3


@dataclass
class ProgressBar:
    """Progress of one task; ``advance`` it as parts are finished."""

    on_advance: Callable[[int, str], None]
    total: int
    done: int = field(default=0)

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count ``n`` more parts as done; ``note``: its state in a few words."""
        self.done += n
        self.on_advance(self.done, note)


class Console:
    """Prints a run's lines; with ``enabled`` false (any rank but 0) it prints nothing.

    On a terminal, lines appear above a live progress bar. Elsewhere (a file, a pipe) everything is plain lines
    without colour or control codes, and progress is a line now and then.

    ``seconds_between_lines`` of plain progress, at least.
    """

    def __init__(self, enabled: bool, stream: TextIO | None = None, seconds_between_lines: float = 10.0):
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        self._seconds_between_lines = seconds_between_lines
        self._rich: rich.console.Console | None = None
        self._bars: rich.progress.Progress | None = None
        if enabled and self._stream.isatty():
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._stream, highlight=False, markup=False, emoji=False)

    def info(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            self._print(line)

    def warn(self, *lines: str) -> None:
        """Print lines that stand out."""
        for line in lines:
            self._print(f"warning: {line}", style="yellow")

    def step_line(self, step: int, total: int, values: Values) -> None:
        """Print the line of a training step, from the values of metrics.jsonl."""
        self._print(format_step(step, total, values))

    def rollout_table(self, groups: Sequence[RolloutGroup], limit: int = 4) -> None:
        """Print at most ``limit`` sample rollouts: question, gold answer, response, rewards, advantage."""
        if not self._enabled:
            return
        rows = _rollout_rows(groups)[:limit]
        if self._rich is None:
            for row in rows:
                lines = (f"    {name}: {cell}" for name, cell in zip(_COLUMNS, row, strict=True))
                self._print("\n".join(("  rollout", *lines)))
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Sample rollouts", title_justify="left", show_lines=True)
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name == "advantage" else "left", overflow="fold")
        for row in rows:
            # Text, not str: brackets in a model's answer are not markup.
            table.add_row(*(Text(cell) for cell in row))
        self._rich.print(table)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[ProgressBar]:
        """Show the progress of ``total`` parts while the block runs; blocks may be nested.

        with console.progress("evaluating", len(samples)) as bar:
            for sample in samples:
                ...
                bar.advance()
        """
        description = one_line(description)
        if not self._enabled:
            yield ProgressBar(lambda done, note: None, total)
        elif self._rich is None:
            yield from self._plain_progress(description, total)
        else:
            yield from self._live_progress(description, total)

    def _live_progress(self, description: str, total: int) -> Iterator[ProgressBar]:
        from rich import progress

        # rich allows one live display at a time: nested work is another row of the same display.
        if self._bars is None:
            self._bars = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=self._rich,
            )
            self._bars.start()
        bars = self._bars
        row = bars.add_task(description, total=total)

        def on_advance(done: int, note: str) -> None:
            bars.update(row, completed=done, description=f"{description} ({one_line(note)})" if note else description)

        try:
            yield ProgressBar(on_advance, total)
        finally:
            if len(bars.tasks) > 1:
                bars.remove_task(row)
            else:
                bars.stop()
                self._bars = None

    def _plain_progress(self, description: str, total: int) -> Iterator[ProgressBar]:
        start_seconds = time.monotonic()
        last_line_seconds = start_seconds

        def on_advance(done: int, note: str) -> None:
            nonlocal last_line_seconds
            now_seconds = time.monotonic()
            if done < total and now_seconds - last_line_seconds >= self._seconds_between_lines:
                last_line_seconds = now_seconds
                left_seconds = (now_seconds - start_seconds) * (total - done) / max(done, 1)
                how = f", {one_line(note)}" if note else ""
                self._print(
                    f"{description}: {done}/{total} ({100 * done / total:.0f} %), {left_seconds:.0f} s left{how}"
                )

        bar = ProgressBar(on_advance, total)
        ended = "stopped"
        try:
            yield bar
            ended = "done"
        finally:
            self._print(f"{description}: {ended}, {bar.done}/{total} in {time.monotonic() - start_seconds:.1f} s")

    def _print(self, line: str, style: str | None = None) -> None:
        if not self._enabled:
            return
        # Ids, names and answers come from data and servers, and must not move the cursor.
        line = visible(line)
        # A terminal or file that is not UTF-8 shows what it lacks as escapes instead of stopping the run.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._rich is not None:
            self._rich.print(line, style=style, soft_wrap=True)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


def quiet_libraries() -> None:
    """No progress bars for loading a few tensors, no warning that a CPU machine has no accelerator. Errors stay."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def format_step(step: int, total: int, values: Values) -> str:
    """One line about a step; missing values are left out, except the reward, which then reads ``n/a``.

    step  12/300 | reward 0.61 (accuracy 0.52, format 0.90) | kl 0.012 | entropy 0.41 nat | response 14.6 tok
    | 5,120 tok/s | 0.28 s | shared prefix saved 4,816 of 7,168 tok (3.0x fewer)
    """
    parts = {key.removeprefix("reward/"): value for key, value in values.items() if key.startswith("reward/")}
    segments = [f"step {step:>{len(str(total))}}/{total}"]
    if "reward" in values:
        reward = values["reward"]
        segments.append(f"reward {_with_parts('n/a' if reward is None else f'{reward:.2f}', parts)}")
    segments += [form.format(values[key]) for key, form in _NUMBERS.items() if values.get(key) is not None]
    computed, repeated = values.get("tokens_computed"), values.get("tokens_repeated")
    if computed is not None and repeated and repeated > computed:
        saved, whole = int(repeated - computed), int(repeated)
        ratio = whole / max(1, whole - saved)
        segments.append(f"shared prefix saved {saved:,} of {whole:,} tok ({ratio:.1f}x fewer)")
    for key, words in _TROUBLES.items():
        value = values.get(key) or 0.0
        if key.endswith("_share") and value >= 0.005:
            segments.append(f"{100 * value:.0f} % {words}")
        elif value and not key.endswith("_share"):
            segments.append(f"{value:.0f} {words}")
    return " | ".join(segments)


def _with_parts(total: str, parts: Values) -> str:
    shown = ", ".join(f"{name} {'n/a' if value is None else format(value, '.2f')}" for name, value in parts.items())
    return f"{total} ({shown})" if shown else total


def _rollout_rows(groups: Sequence[RolloutGroup]) -> list[tuple[str, ...]]:
    """Cells of ``_COLUMNS``: each group's rollout with the highest advantage and, if it differs, with the lowest."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        chosen = [0] if group.rollouts else []
        if chosen and group.advantages:
            order = sorted(range(len(group.rollouts)), key=lambda index: group.advantages[index])
            best, worst = order[-1], order[0]
            chosen = [best] if group.advantages[best] == group.advantages[worst] else [best, worst]
        for index in chosen:
            rollout, reward = group.rollouts[index], group.rewards[index] if group.rewards else None
            total = "n/a" if reward is None else "no value" if reward.total is None else f"{reward.total:.2f}"
            rows.append(
                (
                    one_line(" ".join((group.sample.question, *group.sample.options)), 120),
                    one_line(group.sample.answer, 40),
                    one_line(rollout.text + ("" if rollout.finish_reason == "stop" else " [cut off]"), 240),
                    _with_parts(total, reward.parts if reward else {}),
                    f"{group.advantages[index]:+.2f}" if group.advantages else "n/a",
                )
            )
    return rows


def sharing_line(values: Values, share: bool = True) -> str:
    """The effect of sharing in one training step, and why it is small; ``share``: ``model.share_prefix``.

    sharing is on: 16 groups, 52,480 tokens computed instead of 310,272 repeated (5.9x fewer through every linear
    layer); 3 questions begin like another one of their micro-batch (8,192 tokens more saved)
    """
    number = {name: value or 0.0 for name, value in values.items()}
    if not share:
        return (
            f"sharing is off (model.share_prefix=false): {number['groups']:,.0f} groups, "
            f"{number['tokens_computed']:,.0f} tokens computed, every rollout's prompt among them"
        )
    line = (
        f"sharing is on: {number['groups']:,.0f} groups, {number['tokens_computed']:,.0f} tokens computed instead of "
        f"{number['tokens_repeated']:,.0f} repeated ({number['sharing_ratio']:.1f}x fewer through every linear layer"
    )
    if number["sharing_ratio_bound"] > 1.05 * number["sharing_ratio"]:
        line += f", {number['sharing_ratio_bound']:.1f}x if training.micro_batch_tokens held all groups at once"
    line += ")"
    if number["questions_sharing"]:
        line += (
            f"; {number['questions_sharing']:,.0f} questions begin like another one of their micro-batch "
            f"({number['tokens_shared_across_questions']:,.0f} tokens more saved)"
        )
    if number["groups_chunked"]:
        line += (
            f"; {number['groups_chunked']:,.0f} groups are larger than training.micro_batch_tokens: their prompts run "
            "once and their responses follow in chunks"
        )
    if recorded := number.get("tokens_recorded"):
        line += f"; {recorded:,.0f} tokens started from the forward of sampling"
    return line + _why_little(number)


def generation_line(values: Values, share: bool = True) -> str:
    """The effect of sharing in the first step's generation.

    generation: 2,288 prompt tokens prefilled once for all rollouts, 2,048 after what prompts share; 412 new tokens/s;
    KV cache: at most 0.013 GiB
    """
    number = {name: value or 0.0 for name, value in values.items()}
    prompt, prefill = number["generation/prompt_tokens"], number["generation/prefill_tokens"]
    how = "once for all rollouts" if share else "by every rollout for itself"
    line = f"generation: {prompt:,.0f} prompt tokens prefilled {how}"
    if prefill < prompt:
        line += f", {prefill:,.0f} after what prompts share"
    line += (
        f"; {number['generation/tokens_per_second']:,.0f} new tokens/s; KV cache: at most "
        f"{number['generation/peak_gib']:.2g} GiB"
    )
    divided = number.get("generation/prompts_divided", 0.0)
    if divided:
        line += f"; keys and values of {divided:,.0f} prompts divided over the sequence ranks (without CUDA graphs)"
    return line


def _why_little(number: Mapping[str, float]) -> str:
    if number["sharing_ratio"] >= LITTLE_GAIN:
        return ""
    prompt, response = number["prompt_tokens_mean"], number["response_tokens_mean"]
    rollouts = number["generations_mean"]
    reasons, changes = [], []
    if prompt < response:
        reasons.append(f"prompts of {prompt:,.0f} tokens are short against responses of {response:,.0f}")
        changes.append("more frames or pixels (media.max_frames, media.max_pixels) or shorter responses")
    if rollouts == 1:
        reasons.append("each prompt has one response, and few of a step's questions are on one video")
        changes.append("several questions on each video, and a higher training.prompts_per_step")
    elif rollouts < 4:
        reasons.append(f"only {rollouts:.3g} rollouts share a prompt")
        changes.append("a higher rollout.num_generations")
    if not reasons:
        reasons.append("few rollouts stand behind the long prompts")
        changes.append("a higher rollout.num_generations")
    return f". That is little: {' and '.join(reasons)}. What helps: {', '.join(changes)}"
