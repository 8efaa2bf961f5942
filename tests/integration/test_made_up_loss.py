"""A loss and an advantage estimator of the user's own: one file each, named in the config, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.groups import make_case, plain_model, repeated_logprobs, tiny_policy
from tests.support.processes import launch_ranks
from tests.support.runs import read_lines
from tests.support.short_run import short_run, train_here
from tests.support.training import RecordingEngine, make_groups
from vlm_pg.algorithms.advantages import GroupRewards
from vlm_pg.algorithms.own import load_estimator, load_loss
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.algorithms.tokens import ResponseTokens
from vlm_pg.errors import ConfigError
from vlm_pg.training.groups import REWARD_PART
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import Update, UpdateSettings, update_policy

LOSS = """
import torch

from vlm_pg.metrics import Chart, Metric

SQUARE = Metric("made_up/square", "squared nats per token", chart=Chart("Squares"))
ADVANTAGE = Metric("made_up/largest_advantage", how="largest")


def reinforce(tokens, settings, beta=0.0):
    square = tokens.policy_logprobs.square()
    terms = tokens.advantages * tokens.policy_logprobs - beta * square
    return -(tokens.weights * terms).sum(), {SQUARE: square.sum(), ADVANTAGE: float(tokens.advantages.max())}


def half(tokens, settings):
    return tokens.policy_logprobs.sum().bfloat16(), {}


def constant(tokens, settings):
    return torch.zeros(()), {}


def by_token(tokens, settings):
    return tokens.policy_logprobs, {}


def alone(tokens, settings):
    return tokens.policy_logprobs.sum()


def numbers(tokens, settings):
    return tokens.policy_logprobs.sum(), {SQUARE: 1.0, ADVANTAGE: torch.zeros(())}


def plain_name(tokens, settings):
    return tokens.policy_logprobs.sum(), {"square": 1.0}


def per_token_metric(tokens, settings):
    return tokens.policy_logprobs.sum(), {SQUARE: tokens.weights}


def taken_name(tokens, settings):
    return tokens.policy_logprobs.sum(), {Metric("entropy"): 1.0}


def taken_key(tokens, settings):
    return tokens.policy_logprobs.sum(), {Metric("step"): 1.0}


def taken_kind(tokens, settings):
    return tokens.policy_logprobs.sum(), {Metric("reward/square"): 1.0}


def other_way_round(settings, tokens):
    return tokens.policy_logprobs.sum(), {}


def asks_for_more(tokens, settings, beta):
    return tokens.policy_logprobs.sum(), {}
"""

ESTIMATOR = '''
import math


def weighted(group, settings, power=1.0):
    """Rewards less a weighted mean: as in OPO (arXiv 2505.23585) by length, and by place, so that weights differ."""
    shares = [(length + place) ** power for place, length in enumerate(group.lengths)]
    mean = sum(share * total for share, total in zip(shares, group.totals)) / sum(shares)
    return [total - mean for total in group.totals]


def of_step(groups, settings):
    """Less the mean of the step: all ranks' groups."""
    totals = [total for group in groups for total in group.totals]
    return [[total - sum(totals) / len(totals) for total in group.totals] for group in groups]


def too_few(group, settings):
    return [0.0]


def not_finite(group, settings):
    return [math.nan] * len(group.totals)


def no_numbers(group, settings):
    return None


def whatever(group, settings):
    return [1.0] * len(group.totals)


def of_batch(batch, settings):
    return []
'''
BETA = 0.3


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "estimator.py").write_text(ESTIMATOR)
    return tmp_path


def made_up_run(folder: Path, estimator: str, **sections: Any) -> Path:
    """The configuration of a run that both train."""
    algorithm = {
        "loss": f"{folder}/loss.py:reinforce",
        "loss_arguments": {"beta": BETA},
        "advantages": f"{folder}/estimator.py:{estimator}",
    }
    return short_run(folder, algorithm=algorithm, observe={"rollouts_per_step": 99, "report": False}, **sections)


def logged_groups(run: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Step and rows of each group in rollouts.jsonl."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in read_lines(run / "rollouts.jsonl"):
        groups.setdefault((row["step"], row["sample_id"]), []).append(row)
    return [(step, rows) for (step, _), rows in groups.items()]


def test_both_train_a_run_and_are_recorded(own: Path) -> None:
    config = made_up_run(own, "weighted")
    assert train_here(config, "algorithm.advantage_arguments={power: 2}").code == 0
    run = own / "run"
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 and line["made_up/square"] > 0 and "clip_low" not in line for line in lines)
    groups = logged_groups(run)
    for _, rows in groups:
        shares = [(row["response_tokens"] + row["rollout"]) ** 2 for row in rows]
        mean = sum(share * row["total"] for share, row in zip(shares, rows, strict=True)) / sum(shares)
        assert [row["advantage"] for row in rows] == pytest.approx([row["total"] - mean for row in rows])
    for line in lines:
        largest = max(row["advantage"] for step, rows in groups for row in rows if step == line["step"])
        assert line["made_up/largest_advantage"] == pytest.approx(largest)
    said = (run / "config.yaml").read_text()
    assert f"loss: {own}/loss.py:reinforce" in said and f"advantages: {own}/estimator.py:weighted" in said
    # A run that goes on with other ones says so.
    more = ["training.steps=4", "algorithm.loss_arguments.beta=0.5"]
    ended = train_here(config, *more, f"algorithm.advantages={own}/estimator.py:of_step")
    assert ended.code == 0
    assert "setting changed since the run began: algorithm.loss_arguments.beta: 0.3 -> 0.5" in ended.printed
    assert f"algorithm.advantages: {own}/estimator.py:weighted -> {own}/estimator.py:of_step" in ended.printed


def test_two_ranks_give_an_estimator_that_asks_for_groups_all_of_the_step(own: Path) -> None:
    training = {"engine": "deepspeed", "deepspeed_config": "configs/deepspeed/zero2.json", "prompts_per_step": 3}
    launch_ranks("vlm_pg.cli", "train", str(made_up_run(own, "of_step", training=training)))
    run, groups = own / "run", logged_groups(own / "run")
    lines = read_lines(run / "metrics.jsonl")
    for step, rows in groups:  # those of rank 0
        mean = lines[step - 1]["reward"]
        assert [row["advantage"] for row in rows] == pytest.approx([row["total"] - mean for row in rows])
        assert sum(row["advantage"] for row in rows) != pytest.approx(0, abs=1e-6)
    assert len(groups) == len(lines) == 3
    assert all(line["groups"] == 3 and line["grad_norm"] > 0 and line["made_up/square"] > 0 for line in lines)


@pytest.mark.parametrize("budget", [10_000, 102], ids=["whole", "in chunks"])
def test_its_gradient_is_that_of_its_formula(own: Path, budget: int) -> None:
    """Under transformers' own forward, rollout by rollout: -mean(A log p - beta (log p)^2), and its metric."""
    policy = tiny_policy()
    cases = [make_case(policy, kind, seed=seed) for seed, kind in enumerate(("video", "image", "text", "images"))]
    groups, oracle = make_groups(policy), plain_model(policy)
    engine = RecordingEngine(policy, TrainingSettings(steps=1))
    algorithm = AlgorithmSettings(loss=f"{own}/loss.py:reinforce", loss_arguments={"beta": BETA})
    metrics = update_policy(engine, None, Update(groups, 1e-4), UpdateSettings(algorithm, budget))
    assert (metrics["groups_chunked"] > 0) == (budget == 102)
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    loss, square = 0.0, 0.0
    for case, group in zip(cases, groups, strict=True):
        logprobs = repeated_logprobs(oracle, case, [rollout.token_ids for rollout in group.rollouts])
        for advantage, values in zip(group.advantages, logprobs, strict=True):
            term = -(advantage * values - BETA * values.square()).sum() / tokens
            term.backward(retain_graph=True)
            loss, square = loss + term.item(), square + values.square().sum().item()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["made_up/square"] == pytest.approx(square / tokens, rel=1e-5)
    compared = 0
    for name, parameter in oracle.named_parameters():
        if name in engine.gradients and parameter.grad is not None:
            assert (engine.gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name
            compared += 1
    assert compared > 20


def called_loss(own: Path, name: str, **arguments: float) -> Any:
    flat = torch.zeros(3)
    settings = AlgorithmSettings(loss=f"{own}/loss.py:{name}", loss_arguments=arguments)
    return load_loss(settings)(ResponseTokens(flat.clone().requires_grad_(), flat, flat, flat, [3]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("half", r"gave a tensor of shape \[\], torch.bfloat16, with graph as loss. A float32 or float64 tensor of no"),
        ("constant", r"gave a tensor of shape \[\], torch.float32, without graph as loss"),
        ("by_token", r"gave a tensor of shape \[3\], torch.float32, with graph as loss"),
        ("alone", r"gave a tensor of shape .*A tuple of the loss and \{Metric: value\} is expected"),
        ("plain_name", r"gave a tensor .*for 'square' \(str\). The key of a metric is a vlm_pg.metrics.Metric"),
        ("per_token_metric", r"gave a tensor of shape \[3\].*for 'made_up/square' \(Metric\)"),
        ("taken_name", r"gave the metric 'entropy'. vlm_pg logs another one under that name: choose a name of its own"),
        ("taken_key", r"gave the metric 'step'. vlm_pg logs another one under that name"),
        ("taken_kind", rf"gave the metric '{REWARD_PART}square'. vlm_pg logs another one under that name"),
        ("other_way_round", r"cannot be called: its parameters are \(settings, tokens\). \(tokens, settings, ...\) is"),
        ("asks_for_more", r"cannot be called: missing a required argument: 'beta'.*algorithm.loss_arguments, which is"),
        ("missing", r"^algorithm.loss names '.*', and '.*' has no function 'missing'. It has reinforce, half"),
    ],
)
def test_a_loss_that_is_none_is_refused(own: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        called_loss(own, name)
    assert f"{own}/loss.py:{name}' " in str(refused.value) or name == "missing"


def test_numbers_come_to_the_device_of_the_loss(own: Path) -> None:
    """Beside the others they are read in one transfer."""
    flat = torch.zeros(3, device="meta")
    loss = load_loss(AlgorithmSettings(loss=f"{own}/loss.py:numbers"))
    _, metrics = loss(ResponseTokens(flat.clone().requires_grad_(), flat, flat, flat, [3]))
    assert [value.device.type for value in metrics.values()] == ["meta", "meta"]


def test_arguments_that_a_loss_does_not_take_are_refused(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be called: got an unexpected keyword argument 'gamma'"):
        called_loss(own, "reinforce", gamma=1.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_few", r"gave \[1\] advantages by group. One finite number for each rollout.*by group: \[3\]"),
        ("not_finite", "gave nan for the reward 1.0"),
        ("no_numbers", "gave .* One finite number for each rollout is expected"),
        ("whatever", "gave 1.0 for the reward None. .* 0 for a reward of None"),
        ("of_batch", r"its parameters are \(batch, settings\). \(group, settings, ...\) or \(groups, settings, ...\)"),
        ("absent", "^algorithm.advantages names .* has no function 'absent'. It has weighted"),
    ],
)
def test_an_estimator_that_is_none_is_refused(own: Path, name: str, said: str) -> None:
    settings, group = AlgorithmSettings(advantages=f"{own}/estimator.py:{name}"), ((1.0, 0.0, None), {}, {}, (4, 4, 4))
    with pytest.raises(ConfigError, match=said):
        load_estimator(settings).of_groups([GroupRewards(*group)])


def test_a_function_without_a_signature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'math:log' of algorithm.loss does not say what its parameters are"):
        load_loss(AlgorithmSettings(loss="math:log"))


def test_an_estimator_of_the_step_is_refused_beside_prune_fill(own: Path) -> None:
    settings = AlgorithmSettings(advantages=f"{own}/estimator.py:of_step", prune_rate=0.5)
    with pytest.raises(ConfigError, match=r"asks for all groups of a step.*Set algorithm.prune_fill=false"):
        load_estimator(settings)
    assert load_estimator(settings.model_copy(update={"prune_fill": False})).of_step


@pytest.mark.parametrize("key", ["loss", "advantages"])
def test_a_run_is_refused_before_its_folder_is_touched(own: Path, key: str) -> None:
    ended = train_here(made_up_run(own, "weighted"), f"algorithm.{key}={own}/nowhere.py:f")
    assert ended.code == 2
    assert f"algorithm.{key} names the file '{own}/nowhere.py', which does not exist. Correct the path" in ended.printed
    assert not (own / "run").exists()
