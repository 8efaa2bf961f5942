"""What a stage has found, from the files and the log that its commands leave. Files may lack or be half there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG_LINES = 40
_ERROR = re.compile(
    r"^(vlm-pg: error: |\w+(\.\w+)*(Error|Exception|Interrupt|Exit)\b|ERROR |Killed|Segmentation fault)"
)
_TEST = re.compile(r"^(?P<name>\S+::.*?) (?P<word>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_REASON = re.compile(r"^(FAILED|ERROR) (?P<name>\S+::.*?)(?: - (?P<reason>.*))?$")
_BEGUN = re.compile(r"^(?P<name>\S+::.*?) *$")


@dataclass
class Reading:
    """Figures of a stage; ``problem``: why they say that it failed; ``remarks``: what else is to be known."""

    figures: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    remarks: list[str] = field(default_factory=list)


def log_lines(log: Path) -> list[str]:
    """Lines of a log; what a progress bar has written over is left out."""
    try:
        text = log.read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").splitlines()]


def last_words(log: Path) -> str:
    """The line that says why a command failed: its last error, else its last line."""
    lines = [line for line in log_lines(log) if line.strip()]
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else "it printed nothing")


def read_json(path: Path) -> Any:
    """What a file of JSON holds, None where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def read_environment(path: Path) -> Reading:
    """Of ``environment.py``."""
    found = read_json(path)
    if not isinstance(found, dict):
        return Reading(problem="it wrote no result")
    remarks = [
        f"{one['name']}: {one['detail']}"
        for one in found["findings"]
        if one["status"] == "missing" and one["detail"] != "not installed"
    ]
    remarks += [f"{name} is not installed: {what}" for name, what in found["not_installed"].items()]
    return Reading({"device": found["device"]}, found["device"].get("problem", ""), remarks)


def read_tests(log: Path) -> Reading:
    """Of ``pytest -v -rfE``, killed on its way or not: counts by outcome, and each test that failed with its reason."""
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}
    running = None
    for line in log_lines(log):
        if found := _TEST.match(line):
            word = found["word"].lower()
            counts[word] = counts.get(word, 0) + 1
            running = None
            if word in ("failed", "error"):
                failed.setdefault(found["name"], "")
        elif (found := _REASON.match(line)) and found["reason"]:
            failed[found["name"]] = found["reason"]
        elif (found := _BEGUN.match(line)) and "::" in line:
            running = found["name"]
    figures: dict[str, Any] = {"counts": counts, "failed": failed}
    if running:
        figures["running"] = running
    problem = ""
    if failed:
        problem = f"{len(failed)} of {sum(counts.values())} tests failed, the first: {next(iter(failed))}"
    elif not counts.get("passed"):
        problem = "no test passed"
    return Reading(figures, problem, [f"when time was up, {running} was running"] if running else [])


def read_kernels(path: Path) -> Reading:
    """Of ``kernels.py``."""
    found = read_json(path)
    if not isinstance(found, dict):
        return Reading(problem="it wrote no result")
    failed = [f"{one['kernel']} at heads {one['heads']}: {one['failed']}" for one in found["checks"] if "failed" in one]
    remarks = [f"{name} does not run here: {reason}" for name, reason in found["not_here"].items()]
    return Reading(found, "; ".join(failed[:3]), remarks)


def read_training(folder: Path, steps: int) -> Reading:
    """Of a run's folder: all steps made, loss and gradient finite, gradient not 0, accuracy after training measured."""
    lines = [line for line in _json_lines(folder / "metrics.jsonl") if line.get("phase") == "train"]
    summary = read_json(folder / "summary.json")
    summary = summary if isinstance(summary, dict) else {}
    before, after = (_accuracies(summary.get(key)) for key in ("eval_before", "eval_after"))
    wanted = ("step", "loss", "grad_norm", "reward", "step_seconds", "tokens_per_second")
    figures = {
        "steps": [{key: line.get(key) for key in wanted} for line in lines],
        "accuracy_before": before,
        "accuracy_after": after,
        "attention_kernel": summary.get("attention_kernel"),
        "seconds": summary.get("seconds"),
    }
    problems = []
    if len(lines) < steps:
        problems.append(f"{len(lines)} of {steps} steps were made")
    for line in lines:
        for key in ("loss", "grad_norm"):
            if not _is_finite(line.get(key)):
                problems.append(f"{key} of step {line.get('step')} is {line.get(key)!r}, not a finite number")
    if lines and not any(_is_finite(line.get("grad_norm")) and line["grad_norm"] > 0 for line in lines):
        problems.append("the gradient of every step is 0")
    if not after:
        problems.append("accuracy after training was not measured")
    return Reading(figures, "; ".join(problems[:4]))


def read_bench_point(path: Path, point: str, ours: str) -> Reading:
    """Of one point ("4096,8,512") in a file of measurements. Others that cannot run are remarks; ours must.

    ``ours``: the name of our contestant.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        return Reading(problem="it wrote no result")
    lengths = [int(part) for part in point.split(",")]

    def is_it(entry: dict[str, Any]) -> bool:
        last = entry.get("response", entry.get("new_tokens"))
        return [entry.get("prefix"), entry.get("generations"), last] == lengths and entry.get("groups", 1) == 1

    measured = [one for one in found.get("points", []) if is_it(one)]
    remarks = [f"{one['contestant']}: {one['reason']}" for one in found.get("skipped", []) if is_it(one)]
    problem = "" if measured else "it was not measured"
    if measured and ours in measured[0]["failed"]:
        problem = f"ours failed: {measured[0]['failed'][ours]}"
    keys = ("measurement", "settings", "machine")
    return Reading({key: found.get(key) for key in keys} | {"points": measured}, problem, remarks)


def read_whole_step(path: Path) -> Reading:
    """Of ``grpo_step.py``: its entry, with why it did not fit where it did not."""
    found = read_json(path)
    if not isinstance(found, dict):
        return Reading(problem="it wrote no result")
    return Reading({"whole_step": found}, found.get("failed", ""))


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; the last one of a killed run may be none."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def _accuracies(evaluation: Any) -> dict[str, float]:
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    return {name: one["accuracy"] for name, one in (sets or {}).items() if _is_finite(one.get("accuracy"))}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
