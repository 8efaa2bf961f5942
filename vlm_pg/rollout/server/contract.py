"""``vlm-pg doctor --server``: the contract between trainer and server, measured on a text, an image and a video.

Each check is one finding. A failed check does not end the others, except where there is no server to check.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlm_pg.distributed import SINGLE_RANK, RankLayout
from vlm_pg.doctor import Finding
from vlm_pg.errors import AnswerError, SampleError, ServerError
from vlm_pg.http.client import run_until_stopped
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.client import ServerClient
from vlm_pg.rollout.server.dialects import POSITION_RULES, REPORTING, ServerInfo
from vlm_pg.rollout.server.divergence import Divergence, divergence
from vlm_pg.rollout.server.generator import STOPPED, ServerGenerator, query_server
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.weights import FP32_LIMIT, ROUNDED_LIMIT, Probe, PushedWeights, probe_prompt
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import MediaKind, Prompt, ResponseGroup

TESTED_VLLM = "0.32"
RESPONSE_TOKENS = 32
# Standard deviation of the noise in changed weights, as a share of each weight's root mean square.
NOISE, SMALLEST_SCALE = 0.2, 0.02
SEED = 0
KINDS: dict[str, MediaKind | None] = {"text": None, "image": "image", "video": "video"}
ADVICE = "Then check again."
SAME_MODEL = (
    "Serve the checkpoint of model.path in the trainer's dtype (vLLM: --dtype float32 or bfloat16), not quantized; "
    "rollout.server.max_probe_divergence sets the limit."
)


@dataclass(frozen=True)
class LoadedModel:
    """A ``TrainedModel`` in one process, without optimizer."""

    policy: Policy
    ranks: RankLayout = SINGLE_RANK

    def save_weights(self, folder: Path) -> None:
        self.policy.model.save_pretrained(folder)

    def gathered_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()


def check_server(
    model: ModelSettings, rollout: RolloutSettings, seed: int, run_dir: Path, update: bool
) -> Iterator[Finding]:
    """All checks, each once it is made.

    Args:
        model: loaded here from ``model.path``; the server should serve the same.
        rollout: ``rollout.server`` names the server, which is not waited for. Sampling settings are neutral here.
        seed: of the requests.
        run_dir: weights for the server are written beside it, unless ``rollout.server.weights_folder`` is set.
        update: whether to load weights into the server: the policy's, changed ones, the policy's again.

    Raises:
        ModelError: the model cannot be loaded here.
    """
    rollout = rollout.model_copy(update={"server": rollout.server.model_copy(update={"wait_seconds": 0.0})})
    url, lines = rollout.server.url, list[str]()
    try:
        server = query_server(rollout, _never, lines.append, ADVICE)
        if not server.loads_by_name:
            server.check_model(rollout.server.model)
    except ServerError as error:
        yield Finding("server", "failed", str(error))
        yield Finding("other checks", "note", "skipped: they need the server")
        return
    served = ", ".join(map(server.shown, server.models)) or "the checkpoint that a request names"
    yield Finding("server", "ok", f"{server.kind} at {url} serves {served}")
    if server.kind == "vllm":
        yield _version(rollout)
    policy = load_policy(model.path, settings=model)
    folders = (Path(rollout.server.weights_folder or run_dir.parent), Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=next(path for path in folders if path.is_dir())) as folder:
        Path(folder).chmod(0o755)  # the server may be another user's
        yield from Contract(policy, rollout, server, seed, Path(folder), update).findings()


class Contract:
    """The checks of a server that answers.

    Args:
        policy: with the weights that the server should have.
        rollout, seed, update: as in ``check_server``.
        server: its kind and models.
        folder: for weights.
    """

    def __init__(
        self, policy: Policy, rollout: RolloutSettings, server: ServerInfo, seed: int, folder: Path, update: bool
    ):
        self._policy, self._rollout, self._server, self._seed = policy, rollout, server, seed
        self._folder, self._update, self._lines = folder, update, list[str]()
        rounded = FP32_LIMIT if policy.dtype == torch.float32 else ROUNDED_LIMIT
        self._limit = rollout.server.max_probe_divergence or rounded
        plain = RolloutSettings(
            engine="server",
            num_generations=rollout.num_generations,
            max_new_tokens=RESPONSE_TOKENS,
            server=rollout.server,
        )
        messages, log = ChatMessages(policy, {}), self._lines.append
        self._generator = ServerGenerator(policy, plain, seed, _never, messages, folder / "served", log, ADVICE, server)
        if server.loads_by_name:
            self._generator.use_checkpoint(policy.settings.path)
        self._scorer = PolicyScorer(policy, rollout.prefill_tokens)
        # Of the rollouts of each kind of prompt that the server answered.
        self._found: dict[str, Divergence] = {}

    def findings(self) -> Iterator[Finding]:
        kinds = [kind for kind in KINDS if kind == "text" or self._policy.family.reads_media]
        if self._server.kind != "vllm" and "video" in kinds:
            kinds.remove("video")
            yield Finding("prompt: video", "note", "not tried", "Only vLLM reads videos with frames that are sampled.")
        for kind in kinds:
            yield self._prompt(kind)
            yield from self._logged()
        yield self._positions()
        for kind, found in self._found.items():
            yield self._judged(f"logprobs: {kind}", found)
        if self._found:
            yield self._caches(list(self._found)[-1])
            yield from self._logged()
        for finding in self._updates():
            yield finding
            yield from self._logged()

    def _prompt(self, kind: str) -> Finding:
        """Sample from a prompt, which the server must read with the trainer's ids, and return the sampled ids."""
        name, prompt = f"prompt: {kind}", probe_prompt(self._policy, KINDS[kind])
        try:
            exact, self._found[kind] = self._sample(prompt, "contract")
        except (ServerError, SampleError) as error:
            return Finding(name, "failed", str(error))
        echo = self._generator.prompt_echo
        same = {"ids": "token ids equal the trainer's", "length": "tokens, as many as here", "": "tokens here"}[echo]
        sent = "the ids that were sampled" if exact else "text, which is tokenized again"
        detail = f"{prompt.num_tokens} {same}; responses are {sent}"
        if echo and exact:
            return Finding(name, "ok", detail)
        if self._server.kind == "vllm":
            remedy = f"vLLM {TESTED_VLLM} reports ids of prompt and responses (return_token_ids). Use it without a proxy."
            return Finding(name, "failed", f"{detail}; the server reports no ids", remedy)
        unknown = "" if echo else " What this server reads is not known."
        return Finding(name, "note", detail, f"Other ids than the sampled ones are possible; vLLM returns them.{unknown}")

    def _sample(self, prompt: Prompt, step: str) -> tuple[bool, Divergence]:
        """Whether the server returns token ids; the divergence of its log-probabilities from the policy's."""
        (answers,) = self._generator.generate([prompt], step)
        if isinstance(answers, AnswerError):
            raise answers
        group = ResponseGroup(prompt, tuple(torch.tensor(answer.token_ids) for answer in answers))
        (scores,) = self._scorer.score([group], 1.0)
        return all(answer.exact for answer in answers), divergence([answer.logprobs for answer in answers], scores)

    def _positions(self) -> Finding:
        ours, theirs = self._policy.settings.positions, POSITION_RULES.get(self._server.kind)
        if theirs == ours or not self._policy.family.reads_media:
            return Finding("positions", "ok", f"rule {ours} on both sides")
        if theirs is None:
            remedy = "With videos, use a server of a known kind; images have the same positions by every rule."
            return Finding("positions", "note", f"rule {ours} here; the server's is not known", remedy)
        remedy = f"Set model.positions={theirs}; only videos have other positions."
        return Finding("positions", "note", f"rule {ours} here, {theirs} at the server", remedy)

    def _judged(self, name: str, found: Divergence, before: str = "") -> Finding:
        """Log-probabilities of server and trainer within the limit."""
        if not found.tokens:
            reports = self._server.kind in REPORTING
            remedy = "The server's policy is not known, and weight updates cannot be checked. Use one that reports them."
            return Finding(name, "failed" if reports else "note", f"{before}no log-probabilities reported", remedy)
        detail = (
            f"{before}KL {found.mean:.2g} nats per token over {found.tokens} tokens (limit {self._limit:g}), largest "
            f"difference {found.largest:.2g}"
        )
        return Finding(name, "ok", detail) if found.mean <= self._limit else Finding(name, "failed", detail, SAME_MODEL)

    def _caches(self, kind: str) -> Finding:
        """The same question again, of which the server has keys, values and features now."""
        count = self._rollout.num_generations
        try:
            _, found = self._sample(probe_prompt(self._policy, KINDS[kind]), "contract again")
        except ServerError as error:
            return Finding("caches", "failed", str(error))
        requests = "1 request" if self._generator.takes_n else f"{count} requests"
        return self._judged("caches", found, f"{count} responses in {requests}, {kind} prompt repeated: ")

    def _updates(self) -> Iterator[Finding]:
        if self._rollout.server.weights == "keep":
            yield Finding("weight update", "note", "not needed with rollout.server.weights=keep")
            return
        folder, log = self._folder / "weights", self._lines.append
        given = (self._rollout, self._server)
        try:
            pushed = PushedWeights(LoadedModel(self._policy), *given, self._seed, _never, folder, log)
        except ServerError as error:
            yield Finding("weight update", "failed", str(error))
            return
        if self._server.loads_by_name:
            yield Finding("weight update", "ok", "requests name the folder of the run's weights")
            return
        yield Finding("endpoints", "ok", "all that loading weights takes")
        if not self._update or "text" not in self._found:
            why = "the server has another model" if self._update else "it changes what the server samples from"
            remedy = "" if self._update else "Add --update while no run uses the server. It ends with the model's weights."
            yield Finding("weight update", "note", f"not tried: {why}", remedy)
            return
        probe = Probe(self._policy, *given, str(self._rollout.server.url), self._seed, _never, log)
        same = self._load("load: same weights", pushed, probe)
        yield same
        if same.status == "failed":
            return
        weights = [weight for weight in self._policy.model.parameters() if weight.is_floating_point()]
        if self._policy.settings.lora is not None:
            weights = [weight for weight in weights if weight.requires_grad]
        originals = [weight.detach().to("cpu", copy=True) for weight in weights]
        try:
            self._change(lambda: _add_noise(weights))
            # Fills the server's caches from the weights before.
            apart = probe.compare("other weights", pushed.adapter).mean
            changed = self._load("load: changed", pushed, probe, f"KL {apart:.2g} before, then ")
            yield changed
            if changed.status == "ok" and apart <= 2 * self._limit:
                yield Finding("load: changed", "note", "the change is too small to see whether they were loaded")
        except ServerError as error:
            yield Finding("load: changed", "failed", str(error))
        finally:
            self._change(lambda: _copy(originals, weights))
            last = self._load("load: model's own", pushed, probe)
        yield last

    def _load(self, name: str, pushed: PushedWeights, probe: Probe, before: str = "") -> Finding:
        """Load the policy's present weights, and probe twice: the second time, the server's caches are filled."""
        start = time.monotonic()
        try:
            pushed.take_divergence()
            pushed.sync()
            seconds = time.monotonic() - start
            found = pushed.take_divergence() + probe.compare("again", pushed.adapter)
        except ServerError as error:
            return Finding(name, "failed", str(error))
        return self._judged(name, found, f"{seconds:.1f} s; {before}")

    def _change(self, change: Callable[[], None]) -> None:
        with torch.no_grad():
            change()
        self._policy.weights_changed()
        # A frozen tower's features too.
        self._policy.vision.forget()

    def _logged(self) -> Iterator[Finding]:
        """What generator and probes logged since the last call."""
        lines, self._lines[:] = list(self._lines), []
        yield from (Finding("log", "note", line) for line in lines)


def _version(rollout: RolloutSettings) -> Finding:
    async def query() -> dict[str, Any]:
        async with ServerClient(rollout.server, lambda line: None, lambda topic, line: None, ADVICE) as client:
            return await client.control("/version")

    try:
        version = run_until_stopped(query(), _never, STOPPED).get("version")
    except ServerError:
        version = None
    remedy = f"vLLM {TESTED_VLLM} was tested (docs/servers.md)."
    if not isinstance(version, str):
        return Finding("vLLM version", "note", "not reported (GET /version)", remedy)
    is_tested = version.startswith(f"{TESTED_VLLM}.")
    return Finding("vLLM version", "ok" if is_tested else "note", version, "" if is_tested else remedy)


def _add_noise(weights: list[torch.nn.Parameter]) -> None:
    """The same noise in every process on one kind of device."""
    generator = torch.Generator(weights[0].device).manual_seed(SEED)
    for weight in weights:
        scale = NOISE * (float(weight.float().square().mean().sqrt()) or SMALLEST_SCALE)
        noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
        weight.add_(scale * noise)


def _copy(originals: list[torch.Tensor], weights: list[torch.nn.Parameter]) -> None:
    for original, weight in zip(originals, weights, strict=True):
        weight.copy_(original)


def _never() -> bool:
    return False
