"""``vlm-pg verify`` passes on sound models and names the worst parameter where a kernel is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipelines.embedded import main as prepare_embedded
from tests.support.runs import ROOT, save_tiny_model
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.cli import main
from vlm_pg.verify.main import Errors, Values, errors, run_side, shared_backward, too_far_in_bf16, too_far_in_fp32

SUM = {
    "problem_id": 1,
    "problem": "How much is 2 + 3?",
    "data_type": "text",
    "problem_type": "numerical",
    "solution": "<answer>5</answer>",
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clips")
    prepare_embedded(["--out", str(path), "--train", "8", "--eval", "8"])
    return path / "train.jsonl"


def verify(records: Path, *more: str) -> int:
    """The exit code of the command on the embedded task."""
    config = str(ROOT / "configs" / "embedded.yaml")
    small = ["rollout.num_generations=4", "media.workers=0", f"model.path={ROOT}/assets/tiny-qwen2_5-vl"]
    return main(["verify", config, f"data.train={records}", *small, *more, "--response-tokens", "12"])


def test_videos_in_bf16_beside_the_error_that_bf16_has(clips: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(clips, "model.dtype=bf16") == 0
    printed = capsys.readouterr().out
    assert "2 question(s), prompts of 60 tokens (16 visual) and 60 tokens (16 visual); 8 responses of" in printed
    assert printed.count("  seconds ") == printed.count("  peak memory beside the weights, MiB ") == 2
    assert "  log-probabilities: largest difference" in printed and "bf16, errors against fp32 repeated" in printed
    assert "verify: passed, sharing is exact here" in printed


def test_a_text_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "model", "qwen3")
    (tmp_path / "records.json").write_text(f"[{repr(SUM).replace(chr(39), chr(34))}]")
    one = ("--questions", "1", f"model.path={tmp_path}/model", "model.train=[language]")
    assert verify(tmp_path / "records.json", *one) == 0
    printed = capsys.readouterr().out
    assert f"model: {tmp_path}/model (qwen3) on cpu" in printed and "1 question(s)" in printed


def test_a_wrong_kernel_fails_and_the_worst_parameter_is_named(
    clips: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys of the prefix get 2 % too little gradient from the responses; the small trees of the self-check pass."""
    sound = CpuFlashKernel.segments_backward

    def broken(self: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_q, grad_k, grad_v = sound(self, *args)
        return grad_q, grad_k if args[6].causal else 0.98 * grad_k, grad_v

    monkeypatch.setattr(CpuFlashKernel, "segments_backward", broken)
    monkeypatch.setattr("vlm_pg.models.network.check_kernel", lambda *_: 0.0)
    assert verify(clips) == 1
    printed = capsys.readouterr().out
    assert "verify: FAILED, sharing is not exact here" in printed
    named = printed.split("the gradient of ")[1].split(" is off by ")[0]
    assert f"worst of 56 parameters {named} " in printed
    assert float(printed.split(f"parameters {named} ")[1].split()[0]) > 5e-3


def test_what_cannot_be_compared_is_refused(clips: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(clips, "model.share_prefix=false") == 2
    assert "model.share_prefix is false, but verify compares sharing with repeating" in capsys.readouterr().err
    assert main(["verify", str(ROOT / "configs" / "embedded.yaml"), "data.train=null"]) == 2
    assert "data.train is not set. verify takes its questions from there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        verify(clips, "--questions", "0")
    assert "0 is not a count; give 1 or more" in capsys.readouterr().err


def test_errors_are_relative_and_small_gradients_are_measured_by_the_largest() -> None:
    reference = Values([torch.zeros(2)], {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-9])})
    found = Values([torch.tensor([0.0, 0.5])], {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([-1e-9])})
    measured = errors(found, reference)
    assert measured.logprob_max == 0.5 and measured.logprob_rms == pytest.approx(0.125**0.5)
    assert measured.gradient == pytest.approx(0.1) and measured.worst == ("a", pytest.approx(0.1))
    assert measured.by_parameter["b"] < 1e-6
    assert len(list(too_far_in_fp32(measured))) == 2 and "the gradient of a is" in list(too_far_in_fp32(measured))[1]


def test_what_is_not_a_number_is_too_far() -> None:
    nan = float("nan")
    assert len(list(too_far_in_fp32(Errors(nan, nan, nan, {"a": 0.5, "b": nan})))) == 2
    assert "the gradient of b" in next(too_far_in_fp32(Errors(0.0, 0.0, 0.0, {"a": 0.5, "b": nan})))
    sound = Errors(0.1, 0.01, 0.05, {"a": 0.05, "b": 0.05})
    assert len(list(too_far_in_bf16(Errors(nan, nan, nan, {"a": 0.05, "b": nan}), sound))) == 3


def test_bf16_is_allowed_twice_the_error_of_repeating() -> None:
    repeated = Errors(0.1, 0.01, 0.05, {"a": 0.05, "b": 0.01})
    assert not list(too_far_in_bf16(Errors(0.3, 0.019, 0.09, {"a": 0.11, "b": 0.03}), repeated))
    logprobs, gradient, parameter = too_far_in_bf16(Errors(0.3, 0.021, 0.11, {"a": 0.11, "b": 0.05}), repeated)
    assert "2.1e-02 nats (rms) from fp32, repeated ones 1.0e-02" in logprobs
    assert "off by 1.1e-01 of its norm, the repeated one by 5.0e-02" in gradient
    assert "the gradient of b in bf16 is off by 5.0e-02 of its norm, the repeated one by 1.0e-02" in parameter


def test_a_group_beyond_the_budget_is_computed_in_chunks_with_the_same_result() -> None:
    from tests.support.groups import make_case, random_group, tiny_policy

    policy = tiny_policy(train_vision=True)
    case = make_case(policy, "video", 1)
    groups = [random_group(policy, case, [9, 1, 6, 4], 0)]
    whole = run_side(policy, groups, shared_backward(10_000))
    seen: list[int] = []
    policy.language_model.layers[0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    cut = run_side(policy, groups, shared_backward(case.prompt.num_tokens + 9))
    assert max(seen) <= case.prompt.num_tokens and len(seen) > 4
    measured = errors(cut.values, whole.values)
    assert measured.logprob_max < 1e-5 and measured.worst[1] < 1e-4 and len(measured.by_parameter) > 30
