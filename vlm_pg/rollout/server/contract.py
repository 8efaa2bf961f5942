"""``vlm-pg doctor --server``: the contract between trainer and server, measured on a text, an image and a video.

Each check is one finding. A failed check does not end the others, except where there is no server to check.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vlm_pg.distributed import SINGLE_RANK, RankLayout
from vlm_pg.doctor import Finding
from vlm_pg.errors import SampleError, ServerError
from vlm_pg.http.client import run_until_stopped
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.rollout.server.client import ServerClient
from vlm_pg.rollout.server.dialects import POSITION_RULES, REPORTING, ServerInfo
from vlm_pg.rollout.server.divergence import Divergence
from vlm_pg.rollout.server.generator import STOPPED, query_server
from vlm_pg.rollout.server.probe import Probe
from vlm_pg.rollout.server.weights import FP32_LIMIT, ROUNDED_LIMIT, TESTED_VLLM, PushedWeights
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import MediaKind

RESPONSE_TOKENS = 32
# Standard deviation of the noise in changed weights: a share of each weight's root mean square; of one that is 0.
NOISE, OF_ZERO = 0.1, 0.02
KINDS: dict[str, MediaKind | None] = {"text": None, "image": "image", "video": "video"}
ADVICE = "Then check again."
SAME_MODEL = (
    "Serve the checkpoint of model.path in the trainer's dtype (vLLM: --dtype float32 or bfloat16), not quantized. "
    "rollout.server.max_probe_divergence sets the limit."
)


@dataclass
class LoadedModel:
    """A ``TrainedModel`` in one process, without optimizer."""

    policy: Policy
    ranks: RankLayout = SINGLE_RANK

    def save_weights(self, folder: Path) -> None:
        self.policy.model.save_pretrained(folder)

    def gathered(self, weights: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def gathered_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()


def check_server(
    model: ModelSettings, rollout: RolloutSettings, seed: int, run_dir: Path, update: bool
) -> Iterator[Finding]:
    """All checks, each as soon as it is made.

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
    try:
        server = query_server(rollout, _never, lambda line: None, ADVICE)
        server.check_model(rollout.server.model)
    except ServerError as error:
        yield Finding("server", "failed", str(error))
        yield Finding("other checks", "note", "skipped: they need the server")
        return
    served = ", ".join(map(server.shown, server.models)) or "the checkpoint that a request names"
    yield Finding("server", "ok", f"{server.kind} at {rollout.server.url} serves {served}")
    if server.kind == "vllm":
        is_tested, remedy = str(server.version).startswith(TESTED_VLLM), f"vLLM {TESTED_VLLM} was tested."
        yield Finding("vLLM version", "ok" if is_tested else "note", str(server.version), "" if is_tested else remedy)
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
        rounding = FP32_LIMIT if policy.dtype == torch.float32 else ROUNDED_LIMIT
        self._limit = rollout.server.max_probe_divergence or rounding
        count = rollout.num_generations
        given = (policy, rollout, server, str(rollout.server.url), seed, _never, self._lines.append)
        self._probe = Probe(*given, ADVICE, count, RESPONSE_TOKENS)
        self._generator = self._probe.generator
        # Of the rollouts of each kind of prompt that the server answered.
        self._found: dict[str, Divergence] = {}

    def findings(self) -> Iterator[Finding]:
        """And what generator and probes log."""
        for finding in self._checks():
            yield finding
            lines, self._lines[:] = list(self._lines), []
            yield from (Finding("log", "note", line) for line in lines)

    def _checks(self) -> Iterator[Finding]:
        has_media = self._policy.family.reads_media
        for kind in KINDS if has_media else ("text",):
            yield self._prompt(kind)
        ours, theirs = self._policy.settings.positions, POSITION_RULES.get(self._server.kind)
        if theirs == ours or not has_media or self._server.kind == "vlm_pg":
            yield Finding("positions", "ok", f"rule {ours} on both sides")
        else:
            remedy = f"Only videos have other positions. Set model.positions={theirs or '... as the server does'}."
            yield Finding("positions", "note", f"rule {ours} here, {theirs or 'unknown'} at the server", remedy)
        for kind, found in self._found.items():
            yield self._judged(f"logprobs: {kind}", found)
        if self._found:
            yield self._caches(list(self._found)[-1])
        yield from self._weight_update()

    def _prompt(self, kind: str) -> Finding:
        """A prompt, which the server must read with the trainer's ids; it must return the sampled ids."""
        name = f"prompt: {kind}"
        if kind == "video" and self._server.kind not in ("vlm_pg", "vllm"):
            return Finding(name, "note", "not tried", "Train on videos with vLLM: others sample their frames again.")
        try:
            count, exact, self._found[kind] = self._probe.ask("contract", KINDS[kind])
        except (ServerError, SampleError) as error:
            return Finding(name, "failed", str(error))
        echo = self._generator.prompt_echo
        same = {"ids": "token ids equal the trainer's", "length": "tokens as here", "": "tokens here, unknown there"}
        detail = f"{count} {same[echo]}; responses with{'' if exact else 'out'} token ids"
        if echo and exact:
            return Finding(name, "ok", detail)
        if self._server.kind == "vllm":
            return Finding(name, "failed", detail, f"vLLM {TESTED_VLLM} returns all ids. Use it, without a proxy.")
        return Finding(name, "note", detail, "Texts are tokenized again, to other ids at times. vLLM returns ids.")

    def _judged(self, name: str, found: Divergence, before: str = "") -> Finding:
        """Whether the log-probabilities of server and trainer are within the limit."""
        if not found.tokens:
            remedy = "Which policy samples is not known, nor whether it is updated. Use a server that reports them."
            unknown = Finding(name, "note", f"{before}no log-probabilities reported", remedy)
            return replace(unknown, status="failed") if self._server.kind in REPORTING else unknown
        detail = (
            f"{before}KL {found.mean:.1e} nats per token (limit {self._limit:g}), largest difference "
            f"{found.largest:.1e} of {found.tokens} tokens"
        )
        return Finding(name, "ok", detail) if found.mean <= self._limit else Finding(name, "failed", detail, SAME_MODEL)

    def _caches(self, kind: str) -> Finding:
        """The same prompt again, of which the server has keys, values and features now."""
        count = self._rollout.num_generations
        try:
            found = self._probe.ask("contract again", KINDS[kind]).divergence
        except ServerError as error:
            return Finding("caches", "failed", str(error))
        requests = "1 request" if self._generator.takes_n else f"{count} requests"
        return self._judged("caches", found, f"{kind} prompt again, {count} responses in {requests}: ")

    def _weight_update(self) -> Iterator[Finding]:
        name, folder, log = "weight update", self._folder / "weights", self._lines.append
        if self._rollout.server.weights == "keep":
            yield Finding(name, "note", "none, with rollout.server.weights=keep")
            return
        given = (self._rollout, self._server)
        try:
            pushed = PushedWeights(LoadedModel(self._policy), *given, self._seed, _never, folder, log)
        except ServerError as error:
            yield Finding(name, "failed", str(error))
            return
        yield Finding("endpoints", "ok", "all that loading weights takes")
        text = self._found.get("text", Divergence())
        if not self._update:
            remedy = "Add --update while no run uses the server. It has the model's weights afterwards."
            yield Finding(name, "note", "not tried: it changes what the server samples from", remedy)
        elif not text.tokens or text.mean > max(self._limit, ROUNDED_LIMIT):
            # They may be those of a run, or of a model of other shapes.
            yield Finding(name, "note", "not tried: it would replace other weights than the model's", SAME_MODEL)
        else:
            probe = Probe(self._policy, *given, str(self._rollout.server.url), self._seed, _never, log)
            yield from self._loads(pushed, probe)

    def _loads(self, pushed: PushedWeights, probe: Probe) -> Iterator[Finding]:
        """The policy's weights, changed ones, and the policy's again, whatever happens between."""
        same, name = self._load("load: same weights", pushed, probe), "load: changed weights"
        yield same
        if same.status == "failed":
            yield Finding(name, "note", "not tried")
            return
        is_adapter = self._policy.settings.lora is not None
        weights = [
            w for w in self._policy.model.parameters() if w.is_floating_point() and w.requires_grad >= is_adapter
        ]
        originals = [weight.detach().to("cpu", copy=True) for weight in weights]
        try:
            self._set(weights, _with_noise(weights))
            # Fills the server's caches from the weights before.
            apart = probe.compare("other weights", pushed.adapter).mean
            pushed.sleep()
            changed = self._load(name, pushed, probe, f"KL {apart:.1e} before, then ")
            if changed.status == "ok" and apart <= 2 * self._limit:
                changed = replace(
                    changed, status="note", remedy="So small a change does not show whether it is loaded."
                )
            yield changed
        except ServerError as error:
            yield Finding(name, "failed", str(error))
        finally:
            self._set(weights, originals)
            last = self._load("load: model's weights", pushed, probe)
        if last.status == "failed":
            last = replace(last, remedy="The server may still have changed weights. Start it again.")
        yield last
        if pushed.adapter is not None:
            with suppress(ServerError):
                run_until_stopped(self._unload(pushed.adapter), _never, STOPPED)

    async def _unload(self, adapter: str) -> None:
        async with ServerClient(self._rollout.server, self._lines.append, self._generator.log_once, ADVICE) as client:
            await client.control("/v1/unload_lora_adapter", {"lora_name": adapter})

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

    @torch.no_grad()
    def _set(self, weights: Sequence[torch.Tensor], values: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> None:
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
        self._policy.weights_changed()
        # A frozen tower's features too.
        self._policy.vision.forget()


def _with_noise(weights: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same noise each time on one kind of device."""
    generator = torch.Generator(weights[0].device).manual_seed(0)
    for weight in weights:
        scale = NOISE * float(weight.float().square().mean().sqrt()) or OF_ZERO
        noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
        yield weight + scale * noise


def _never() -> bool:
    return False
