"""``vlm-pg eval`` of what a server has: the answers of the same weights in this process, in the protocol's words, with
faults counted, and no weights of a policy anywhere near."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.odd_server import Reply
from tests.support.processes import ROOT
from tests.support.runs import eval_config, read_lines, write_config
from tests.support.tiny_server import TinyServer
from vlm_pg.cli import main
from vlm_pg.prompts.prompt_source import PromptSource

MODEL = ROOT / "assets/tiny-qwen2_5-vl"
QUESTIONS = 12
NAME = f"eval-{MODEL.name}"


@pytest.fixture(scope="module")
def shared() -> Iterator[TinyServer]:
    server = TinyServer(MODEL)
    yield server
    server.stop()


@pytest.fixture
def server(shared: TinyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyServer]:
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    shared.bodies.clear()
    shared.requests = 0
    yield shared
    shared.next_reply = lambda number: None
    shared.schema = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips with a question each, under a protocol that begins the answer and as training asks them."""
    path = tmp_path_factory.mktemp("served")
    prepare_embedded(["--out", str(path / "clips"), "--train", "4", "--eval", str(QUESTIONS)])
    own = {
        "source": "made up",
        "system": "You look closely.",
        "templates": {"*": "Look. {question}\n{options}\nOnly give the best option."},
        "answer_prefix": "Best option:(",
        "read_prefix": "(",
        "media": {"fps": 2.0},
        "max_new_tokens": 9,
        "sampling": {"presence_penalty": 1.5},
    }
    write_config(path / "own.yaml", own)
    records = str(path / "clips" / "eval_seen.jsonl")
    eval_config(
        path,
        {"plain": records, "protocol": records},
        rollout={"max_new_tokens": 7, "max_batch_rollouts": 4},
        eval={"protocols": {"protocol": str(path / "own.yaml")}, "thumbnails": 0},
    )
    return path


def by(server: TinyServer, *others: str) -> list[str]:
    return [
        "rollout.engine=server",
        f"rollout.server.url={server.url}",
        "rollout.server.retries=1",
        "rollout.server.concurrency=2",  # in batches of 4
        "rollout.server.wait_seconds=0",
        *others,
    ]


def arguments(folder: Path, run: str, *overrides: str) -> list[str]:
    return ["eval", "--config", str(folder / "run.yaml"), f"run.dir={folder / run / 'unused'}", *overrides]


def evaluate(folder: Path, run: str, *overrides: str) -> int:
    return main(arguments(folder, run, *overrides))


def answers(out: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(out / f"answers_{name}.jsonl")


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def in_process(folder: Path) -> Path:
    assert evaluate(folder, "here") == 0
    return folder / "here" / NAME


@pytest.fixture(scope="module")
def served(folder: Path, shared: TinyServer) -> tuple[Path, list[dict[str, Any]]]:
    shared.bodies.clear()
    assert evaluate(folder, "served", *by(shared)) == 0
    return folder / "served" / f"{NAME}-server", list(shared.bodies)


def test_a_server_with_the_same_weights_gives_the_same_answers(
    in_process: Path, served: tuple[Path, list[dict[str, Any]]]
) -> None:
    out, requests = served
    assert len(requests) == 2 * QUESTIONS
    for name in ("plain", "protocol"):
        assert answers(out, name) == answers(in_process, name)
    assert result_of(out)["sets"] == result_of(in_process)["sets"]
    assert any(len(row["outputs"][0]["text"]) > 3 for row in answers(out, "plain"))


@pytest.mark.matrix
def test_the_protocols_words_and_sampling_are_what_is_sent(
    folder: Path, served: tuple[Path, list[dict[str, Any]]]
) -> None:
    _, requests = served
    own = [body for body in requests if body.get("continue_final_message")]
    assert len(own) == QUESTIONS
    questions = {record["problem"] for record in read_lines(folder / "clips" / "eval_seen.jsonl")}
    for body in own:
        system, user, begun = body["messages"]
        assert system == {"role": "system", "content": "You look closely."}
        assert begun == {"role": "assistant", "content": "Best option:("}
        words = user["content"][-1]["text"]
        assert words.startswith("Look. ") and words.endswith("\nOnly give the best option.")
        assert any(question in words for question in questions) and "<think>" not in words
        assert user["content"][0]["video_url"]["url"].startswith("data:video/avi;base64,")
        fields = (
            "temperature",
            "max_tokens",
            "presence_penalty",
            "repetition_penalty",
            "top_k",
            "add_generation_prompt",
        )
        assert [body[key] for key in fields] == [0.0, 9, 1.5, 1.0, -1, False]
    others = [body for body in requests if not body.get("continue_final_message")]
    assert {(body["max_tokens"], body["presence_penalty"]) for body in others} == {(7, 0.0)}


@pytest.mark.matrix
def test_the_record_and_a_repetition_say_that_the_servers_weights_are_unknown(
    served: tuple[Path, list[dict[str, Any]]], server: TinyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    record = result_of(served[0])["protocol"]
    decides = record["decides"]
    assert decides["weights"] is decides["dtype"] is decides["share_prefix"] is None
    known = decides["server"]
    assert (known["kind"], known["model"]) == ("vllm", "tiny")
    assert known["asked"]["protocol"]["presence_penalty"] == 1.5 and known["asked"]["plain"]["max_tokens"] == 7
    assert decides["settings"]["rollout"]["engine"] == "server"
    assert record["machine"] == {"device": "a server's", "url": server.url}
    assert main(["eval", "--like", str(served[0] / "result.json")]) == 0
    printed = capsys.readouterr().out
    unknown = "weights and program of the server that gave the earlier and the later answers"
    assert f"not known to be equal: {unknown}" in printed
    assert f"plain: accuracy {result_of(served[0])['sets']['plain']['accuracy']:.4f}" in printed
    assert printed.count(f"{QUESTIONS} of {QUESTIONS} questions equal") == 2


def test_a_question_without_a_usable_answer_is_a_fault_and_not_a_zero(folder: Path, server: TinyServer) -> None:
    broken = read_lines(folder / "clips" / "eval_seen.jsonl")[5]

    def unfit(reply: Reply) -> None:
        words = reply.asked["messages"][-1]["content"][-1]["text"]
        if broken["problem"] in words and all(option in words for option in broken["options"]) and _is_chosen(reply):
            reply.value["choices"][0]["message"]["content"] = None

    chosen: list[str] = []

    def _is_chosen(reply: Reply) -> bool:
        """The first question that comes with these words, whenever it comes."""
        video = reply.asked["messages"][-1]["content"][0]["video_url"]["url"]
        chosen[:] = chosen or [video]
        return video == chosen[0]

    server.next_reply = lambda number: unfit
    assert evaluate(folder, "unfit", *by(server), "eval.sets=[plain]", "data.max_bad_share=0.5") == 0
    out = folder / "unfit" / f"{NAME}-server"
    faults = [row for row in answers(out, "plain") if row["fault"] is not None]
    assert [row["fault"][0] for row in faults] == ["server_answer"] and not faults[0]["outputs"]
    figures = result_of(out)["sets"]["plain"]
    assert figures["n"] == QUESTIONS - 1
    (bad,) = read_lines(out / "bad_samples.jsonl")
    assert bad["reason"] == "server_answer" and bad["sample_id"] == faults[0]["sample_id"]


@pytest.mark.matrix
def test_a_video_that_the_server_would_read_at_other_times_is_a_fault(
    folder: Path, server: TinyServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The videos have 2 frames per second."""
    monkeypatch.setattr("vlm_pg.rollout.server.messages.VLLM_FRAMES_PER_SECOND", 1)
    assert evaluate(folder, "rate", *by(server), "eval.sets=[plain]") == 2
    assert "No question of plain could be scored" in capsys.readouterr().err
    rows = answers(folder / "rate" / f"{NAME}-server", "plain")
    assert {row["fault"][0] for row in rows} == {"video_for_server"} and not server.bodies


@pytest.mark.matrix
def test_an_evaluation_whose_server_fails_resumes_at_a_server_that_has_moved(
    folder: Path, served: tuple[Path, list[dict[str, Any]]], server: TinyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(reply: Reply) -> None:
        reply.status = 500

    server.next_reply = lambda number: fails if number >= 6 else None
    assert evaluate(folder, "failed", *by(server)) == 2
    printed = capsys.readouterr().err
    assert "The same command goes on where this one ended." in printed and "run.resume" not in printed
    moved = TinyServer(MODEL)
    try:
        assert evaluate(folder, "failed", *by(moved)) == 0
    finally:
        moved.stop()
    printed = capsys.readouterr().out
    assert "going on: " in printed and f"url: {server.url} then, {moved.url} now" in printed
    assert len(moved.bodies) < 2 * QUESTIONS
    out = folder / "failed" / f"{NAME}-server"
    for name in ("plain", "protocol"):
        assert answers(out, name) == answers(served[0], name)


@pytest.mark.matrix
def test_the_server_is_busy_while_the_next_prompts_are_made(
    folder: Path, served: tuple[Path, list[dict[str, Any]]], server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers the first batch only when the second has been loaded: one after the other would wait for ever."""
    loaded, load = threading.Semaphore(0), PromptSource.load

    def counted(source: PromptSource, *given: Any) -> Any:
        found = load(source, *given)
        loaded.release()
        return found

    def waits(reply: Reply) -> None:
        assert loaded.acquire(timeout=100)
        assert loaded.acquire(timeout=100), "the second batch should have been loaded meanwhile"

    monkeypatch.setattr(PromptSource, "load", counted)
    server.next_reply = lambda number: waits if number == 0 else None
    assert evaluate(folder, "ahead", *by(server), "eval.sets=[plain]") == 0
    assert answers(folder / "ahead" / f"{NAME}-server", "plain") == answers(served[0], "plain")


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ("sglang", f"{QUESTIONS} of {QUESTIONS} samples have a video"),
        ("vlm_pg", "samples for the updates of a training run alone"),
        ("transformers", "This is transformers serve, which resizes media"),
    ],
)
def test_what_a_server_cannot_be_asked_is_refused_before_anything_is(
    folder: Path, server: TinyServer, owner: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = {"data": [{"id": "tiny", "owned_by": owner}]}
    if owner == "transformers":
        server.schema = Reply({"paths": {"/load_model": {}, "/v1/chat/completions": {}}}, {})
    assert evaluate(folder, f"refused-{owner}", *by(server), "eval.sets=[plain]") == 2
    assert message in capsys.readouterr().err
    assert not server.bodies and not list(folder.glob(f"refused-{owner}/*/answers_*"))


def test_an_absent_server_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = ("rollout.engine=server", "rollout.server.url=http://127.0.0.1:9/v1", "rollout.server.wait_seconds=0")
    assert evaluate(folder, "away", *away) == 2
    printed = capsys.readouterr().err
    assert "has not answered for 0 s" in printed and "The same command goes on" in printed
    assert not (folder / "away").exists() or not list((folder / "away").glob("*/answers_*"))


def test_no_weights_are_loaded_and_a_model_named_by_the_key_is_recorded_without_it(
    folder: Path, server: TinyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*given: Any, **more: Any) -> None:
        raise AssertionError("weights were loaded")

    key = "sk-0123456789abcdefghij"
    monkeypatch.setattr("vlm_pg.eval.eval_model.load_policy", refused)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setattr(server, "models", {"data": [{"id": f"m-{key}", "owned_by": "vllm"}]})
    assert evaluate(folder, "key", *by(server), "eval.limit=1", "eval.sets=[plain]") == 0
    assert {body["model"] for body in server.bodies} == {f"m-{key}"}
    printed = capsys.readouterr()
    assert "answers of 'm-[key]'" in printed.out and "which weights that server was started with is" in printed.out
    assert key not in printed.out + printed.err
    out = folder / "key" / f"{NAME}-server"
    assert result_of(out)["protocol"]["decides"]["server"]["model"] == "m-[key]"
    assert [path for path in out.rglob("*") if path.is_file() and key.encode() in path.read_bytes()] == []
