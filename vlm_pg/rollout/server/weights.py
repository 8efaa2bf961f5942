"""The policy's weights on its servers: loaded from a folder or received by broadcast, proven by a probe.

A server is sampled from only while it reports the version that was set after it had loaded the weights. The version
ends in a random part that is new with every loading, so that a server which was started again, or loaded weights of
another run, is noticed even if that happens while it samples. An adapter (LoRA) is loaded under its version as name,
which requests then ask for.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError

from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.errors import ServerError
from vlm_pg.http.client import run_until_stopped
from vlm_pg.models.policy import Policy
from vlm_pg.models.sharded_weights import stored_tensors
from vlm_pg.models.weights import is_sharded
from vlm_pg.rollout.server.broadcast import PAUSE, Broadcast
from vlm_pg.rollout.server.client import RUN_GOES_ON, ServerClient, gather_or_cancel
from vlm_pg.rollout.server.dialects import Kind, ServerInfo
from vlm_pg.rollout.server.divergence import Divergence
from vlm_pg.rollout.server.generator import STOPPED
from vlm_pg.rollout.server.probe import Probe
from vlm_pg.rollout.settings import RolloutSettings

# Endpoints that loading weights takes. vLLM has them with VLLM_SERVER_DEV_MODE=1.
ENDPOINTS: dict[Kind, frozenset[str]] = {
    "vllm": frozenset(
        ("/collective_rpc", "/update_weight_version", "/weight_info")
        + ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")
    ),
    **dict.fromkeys(("vlm_pg", "sglang"), frozenset(("/update_weights_from_disk", "/model_info", "/flush_cache"))),
}
# And a broadcast to vLLM.
BROADCAST_ENDPOINTS = frozenset(
    ("/get_world_size", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights")
    + ("/finish_weight_update",)
)
# And loading weights while rollouts are sampled; vLLM has the last with --enable-scale-out.
INTERRUPT_ENDPOINTS = frozenset(("/pause", "/resume", "/inference/v1/generate"))
# And an adapter; vLLM has them with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.
ADAPTER_ENDPOINTS = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
SLEEP_ENDPOINTS = frozenset(("/sleep", "/wake_up"))
TESTED_VLLM = "0.32"
# Of a server that is started again while it loads.
LOADING_ATTEMPTS = 3
# Rounding of an fp32 trainer and server stays far below the first; that of bf16 below the second.
FP32_LIMIT, ROUNDED_LIMIT = 1e-7, 0.02
_VERSION = re.compile(r"vlm_pg-(?P<run>.+)-(?P<updates>\d+|loading)-[0-9a-f]+")


class TrainedModel(Protocol):
    """The policy in training, and how to write its weights (an ``Engine``)."""

    policy: Policy
    ranks: RankLayout

    def save_weights(self, folder: Path) -> None:
        """Write the weights; called on every rank."""

    def gathered(self, weights: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Inside, these weights are whole on every rank. A collective."""

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Inside, each rank may call the policy on its own."""


class Version(NamedTuple):
    """Weights that a server has: of which run, after how many updates (None while they load), from which loading."""

    run: str
    updates: int | None
    loading: str

    @classmethod
    def new(cls, run: str, updates: int | None) -> Version:
        """Of weights that are loaded now."""
        return cls(run, updates, secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """None for the version of a server that loaded no weights of a run."""
        found = _VERSION.fullmatch(text)
        if found is None:
            return None
        updates = found["updates"]
        return cls(found["run"], None if updates == "loading" else int(updates), text.rpartition("-")[2])

    def __str__(self) -> str:
        return f"vlm_pg-{self.run}-{'loading' if self.updates is None else self.updates}-{self.loading}"


class PushedWeights:
    """Keeps the servers at the policy's weights.

    Args:
        model: whose weights they are.
        settings: of sampling; ``settings.server`` names the servers.
        server: their kind.
        seed: of the probe's requests.
        should_stop: polled; True raises InterruptedError.
        folder: of this run alone, for the weights; servers see it under the same path.
        log: prints one line.

    Attributes:
        updates: of the weights that the servers have; None before the first loading.

    Raises:
        ServerError: of a kind that cannot load weights (or an adapter), or without an endpoint that this takes.
    """

    def __init__(
        self,
        model: TrainedModel,
        settings: RolloutSettings,
        server: ServerInfo,
        seed: int,
        should_stop: Callable[[], bool],
        folder: Path,
        log: Callable[[str], None],
    ):
        self._model, self._server, self._folder, self._log = model, server, folder.absolute(), log
        self._settings, self._should_stop = settings.server, should_stop
        self._interrupts = settings.interrupts
        # A server of this package loads the folder of an adapter like one of whole weights.
        self._is_adapter = model.policy.settings.lora is not None and server.kind != "vlm_pg"
        _check_endpoints(server, settings, self._is_adapter)
        if server.version is not None and not server.version.startswith(TESTED_VLLM):
            log(
                f"the server at {', '.join(settings.server.urls)} is vLLM {server.version}; loading weights was tested "
                f"with {TESTED_VLLM}. The probe after each loading shows whether it works (docs/servers.md)"
            )
        self._urls = settings.server.urls
        self._run = model.ranks.from_rank0(self._begin)
        self.updates: int | None = None
        self._asleep = False
        self._sends = settings.server.transfer == "broadcast"
        self._sent = dict[str, Version]()
        self._probes = [Probe(model.policy, settings, server, url, seed, should_stop, log) for url in self._urls]
        self._limit = settings.server.max_probe_divergence
        if self._limit is None:
            self._limit = FP32_LIMIT if model.policy.dtype == torch.float32 else ROUNDED_LIMIT
        self._divergence = Divergence()

    def sync(self) -> None:
        """Load the present weights into every server, unless they have them. All ranks call this.

        Raises:
            ServerError: a server does not load the weights, or does not sample from them afterwards.
            OSError: the folder cannot be written.
            InterruptedError: a stop was requested.
        """
        updates, ranks = self._model.policy.weights_version, self._model.ranks
        if self.updates == updates and not self._asleep:
            return
        if self._asleep and self._model.policy.device.type == "cuda":
            torch.cuda.empty_cache()  # the server's memory may be here
        problem = self._broadcast(updates, self._urls) if self._sends else self._write(updates)
        # Rank 0 alone loads them: the others wait for its result, and all raise the same error.
        with self._model.gathered_parameters():
            if ranks.is_rank0 and problem is None:
                try:
                    if self.updates is None and "/resume" in self._server.paths:
                        self._resume(self._urls)  # a run that was killed may have left it paused
                    for number in range(len(self._probes)):
                        self._load(number, updates)
                except (ServerError, InterruptedError) as error:
                    problem = error
        self._raise_of_rank0(problem)
        before, self.updates, self._asleep = self.updates, updates, False
        if ranks.is_rank0 and before is not None and before != updates:
            self._drop(before)

    def sleep(self) -> None:
        """Let every server sleep until the next ``sync``, if that is set. All ranks call this.

        Raises:
            ServerError: a server does not.
        """
        if not self._settings.sleep:
            return
        barrier()  # another rank may still sample
        # At level 2 weights are given up, at level 1 they wait in the host's memory: an adapter needs its base.
        path, problem = f"/sleep?level={1 if self._is_adapter else 2}", None
        if self._model.ranks.is_rank0:
            try:
                for url in self._urls:
                    self._in_client(url, lambda client: client.control(path, {}))
            except (ServerError, InterruptedError) as error:
                problem = error
        self._raise_of_rank0(problem)
        self._asleep = True

    def _raise_of_rank0(self, problem: Exception | None) -> None:
        if (problem := self._model.ranks.from_rank0(lambda: problem)) is not None:
            raise problem

    def confirm(self) -> list[Version]:
        """The version of every server, which is that of the present weights; a server without them loads them again.

        Raises:
            ServerError: another run has loaded its weights into a server; or as ``sync``.
        """
        assert self.updates is not None
        found = self._versions()
        for number, version in enumerate(found):
            url = self._urls[number]
            if version is not None and version.run != self._run:
                raise ServerError(
                    f"The server at {url} has weights of another run ({version.run}), which loaded them while this "
                    f"run ({self._run}) sampled from it. Give every run servers of its own, and go on with "
                    "run.resume=auto."
                )
            if version is None or version.updates != self.updates:
                self._log(f"the server at {url} has lost the weights of this run: loading them again")
                found[number] = self._load(number, self.updates)
        return [version for version in found if version is not None]

    def updates_of(self, version: str) -> int | None:
        """Updates of the weights of this version; None for weights that are not whole, or not of this run."""
        found = Version.parse(version)
        return None if found is None or found.run != self._run else found.updates

    def present(self) -> list[Version] | None:
        """The versions of the servers; None if one has lost the weights."""
        found = [version for version in self._versions() if version and version[:2] == (self._run, self.updates)]
        return found if len(found) == len(self._urls) else None

    @property
    def adapter(self) -> str | None:
        """The name that requests ask for; None where whole weights are loaded."""
        assert self.updates is not None
        return str(self._adapter(self.updates)) if self._is_adapter else None

    def are_still(self, before: Sequence[Version]) -> bool:
        """Whether every server has the weights from the same loading as ``before``."""
        return self._versions() == list(before)

    def take_divergence(self) -> Divergence:
        """Of all probes since the last call."""
        found, self._divergence = self._divergence, Divergence()
        return found

    def _path(self, updates: int) -> Path:
        return self._folder / f"weights-{updates}"

    def _begin(self) -> str:
        """A name that no other run has; weights that an earlier run has left in the folder are removed."""
        shutil.rmtree(self._folder, ignore_errors=True)
        name = re.sub(r"[^A-Za-z0-9_.]", "_", self._folder.parent.name)[:40] or "run"
        return f"{name}-{secrets.token_hex(4)}"

    def _write(self, updates: int) -> Exception | None:
        """Write the weights under their final name once they are whole; why that failed."""
        path, temporary = self._path(updates), self._folder / f".tmp-weights-{updates}"
        is_rank0 = self._model.ranks.is_rank0
        try:
            if is_rank0:
                shutil.rmtree(temporary, ignore_errors=True)
                shutil.rmtree(path, ignore_errors=True)
                temporary.mkdir(parents=True)
            self._model.save_weights(temporary)
            if is_rank0:
                self._model.policy.processor.save_pretrained(temporary)
                temporary.rename(path)
        except (OSError, SafetensorError) as error:
            return ServerError(
                f"The weights for the server could not be written to {self._folder}: {error}. Make room there, or name "
                "another folder that the server sees in rollout.server.weights_folder."
            )
        return None

    def _broadcast(self, updates: int, urls: Sequence[str]) -> Exception | None:
        """Send the weights to these servers, on every rank; why that failed, the same on all."""
        device, seconds, problem = self._model.policy.device, self._settings.timeout_seconds, None
        for _ in range(LOADING_ATTEMPTS):
            loading, version = Version.new(self._run, None), Version.new(self._run, updates)

            async def commit(client: ServerClient, loading: Version = loading, version: Version = version) -> None:
                if not await self._commit(client, loading, version):
                    raise ServerError("It was started again, or another run wrote to it.")

            transfer = Broadcast(urls, self._in_clients, str(loading), commit, device, seconds, self._interrupts)
            tensors = stored_tensors(self._model.policy.model, self._model.gathered)
            with self._resuming(urls if self._model.ranks.is_rank0 else ()):
                failed = transfer.send(tensors, self._model.ranks.is_rank0)
            problem = self._model.ranks.from_rank0(lambda: failed)  # noqa: B023
            if problem is None and self._model.ranks.is_rank0:
                self._sent |= dict.fromkeys(urls, version)
            if not isinstance(problem, ServerError):
                return problem
            self._log(f"a broadcast of the weights failed: {problem}")
        advice = "" if RUN_GOES_ON in str(problem) else f" {RUN_GOES_ON}"
        return ServerError(f"{LOADING_ATTEMPTS} broadcasts of the weights failed, the last with: {problem}{advice}")

    def _give(self, url: str, updates: int) -> Version | None:
        """Load the weights that are in the folder into one server, unless a broadcast has brought them; None if it was
        started again meanwhile."""
        if not self._sends:
            load = self._load_adapter if self._is_adapter else self._load_weights
            with self._resuming([url]):
                if self._interrupts:
                    self._in_client(url, lambda client: client.control(PAUSE, {}))
                return self._in_client(url, lambda client: load(client, updates))
        if url not in self._sent:
            # Other ranks, which would have to gather, sample at a pace of their own.
            alone = self._model.ranks.world_size == 1 and not is_sharded(self._model.policy.model)
            if not alone or self._model.policy.weights_version != updates:
                raise ServerError(
                    f"The server at {url} was started again within a step, and weights of several ranks, or from "
                    "before an update, cannot be broadcast again. With rollout.server.transfer=folder they are loaded "
                    f"again. {RUN_GOES_ON}"
                )
            if (problem := self._broadcast(updates, [url])) is not None:
                raise problem
        return self._sent.pop(url)

    def _load(self, number: int, updates: int) -> Version:
        """Bring the weights to one server; their version there, once the probe has passed."""
        url = self._urls[number]
        for _ in range(LOADING_ATTEMPTS):
            if (version := self._give(url, updates)) is not None:
                found = self._probes[number].compare(f"weights-{updates}", str(version) if self._is_adapter else None)
                if self._in_client(url, self._version) == version:
                    self._divergence += found
                    self._judge(url, updates, found)
                    return version
            self._log(f"the server at {url} was started again while it loaded weights: loading them again")
        raise ServerError(
            f"The server at {url} was started again {LOADING_ATTEMPTS} times while it loaded the weights of the run. "
            f"Its log says why. {RUN_GOES_ON}"
        )

    @contextmanager
    def _resuming(self, urls: Sequence[str]) -> Iterator[None]:
        """Around loading weights: servers that are paused meanwhile go on."""
        try:
            yield
        finally:
            with suppress(ServerError):  # it was started again, and samples from weights that are no run's
                self._resume(urls if self._interrupts else ())

    def _resume(self, urls: Sequence[str]) -> None:
        """Also after a stop request: nothing else would be sampled."""
        self._in_clients(urls, lambda client: client.control("/resume", {}), lambda: False)

    def _judge(self, url: str, updates: int, found: Divergence) -> None:
        """Raise ServerError for a server whose log-probabilities are not those of the weights it was given."""
        assert self._limit is not None
        if not found.tokens:
            raise ServerError(
                f"The server at {url} reports no log-probabilities, so whether it has loaded the weights of this run "
                "is not known. Use a server that reports them, or rollout.engine=in_process."
            )
        if not found.mean <= self._limit:  # NaN too
            raise ServerError(
                f"The server at {url} was given the weights after {updates} updates and samples from others: its "
                f"log-probabilities of {found.tokens} tokens of the probe differ from the trainer's by a KL of "
                f"{found.mean:.3g} nats a token (largest difference {found.largest:.3g}), and "
                f"rollout.server.max_probe_divergence allows {self._limit:g}. It must compute in the trainer's dtype "
                "(--dtype), serve the same model and processor files, and load weights in place (docs/servers.md: "
                f"which vLLM was tested). {RUN_GOES_ON}"
            )

    async def _load_weights(self, client: ServerClient, updates: int) -> Version | None:
        path, loading, version = str(self._path(updates)), Version.new(self._run, None), Version.new(self._run, updates)
        if self._server.kind in ("vlm_pg", "sglang"):
            present = await self._version(client)
            if present is not None and present[:2] == version[:2]:
                return present  # loaded by another rank
            body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
            answer = await client.control("/update_weights_from_disk", body)
            if answer.get("success") is not True:
                raise ServerError(f"{client.url} did not load {path}: {client.excerpt(str(answer.get('message')))}")
            await client.control("/flush_cache", {})
            return version
        await client.control("/update_weight_version", {"new_version": str(loading)})
        if self._asleep:
            await client.control("/wake_up?tags=weights", {})
        try:
            await client.control("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        except ServerError as error:
            raise ServerError(
                f"It did not load {path}: {error} It must see this folder under the same path "
                f"(rollout.server.weights_folder), and serve the trained model; its log says more. {RUN_GOES_ON}"
            ) from error
        if self._asleep:
            await client.control("/wake_up?tags=kv_cache", {})
        return version if await self._commit(client, loading, version) else None

    async def _commit(self, client: ServerClient, loading: Version, version: Version) -> bool:
        """Set the version of a vLLM that has loaded; False if it was started again meanwhile."""
        # They are filled from the old weights: keys and values, and the tower's output by the hash of its pixels.
        for cache in ("prefix", "mm", "encoder"):
            await client.control(f"/reset_{cache}_cache", {})
        if await self._version(client) != loading:
            return False
        with suppress(ServerError):
            await client.control("/update_weight_version", {"new_version": str(version)}, once=True)
            return True
        return False

    def _adapter(self, updates: int) -> Version:
        """The name of an adapter never stands for others: no random part is needed to tell loadings apart."""
        return Version(self._run, updates, "0")

    async def _load_adapter(self, client: ServerClient, updates: int) -> Version:
        version = self._adapter(updates)
        if self._asleep:
            await client.control("/wake_up", {})
        if await self._version(client) != version:  # another process of the run may have loaded it
            body = {"lora_name": str(version), "lora_path": str(self._path(updates))}
            await client.control("/v1/load_lora_adapter", body)
        return version

    def _drop(self, updates: int) -> None:
        """Remove weights that were replaced."""
        shutil.rmtree(self._path(updates), ignore_errors=True)
        body = {"lora_name": str(self._adapter(updates))}
        for url in self._urls if self._is_adapter else ():
            with suppress(ServerError):  # it was started again
                self._in_client(url, lambda client: client.control("/v1/unload_lora_adapter", body, once=True))

    async def _version(self, client: ServerClient) -> Version | None:
        if self._is_adapter:
            listed = (await client.control("/v1/models")).get("data")
            names = [str(entry.get("id")) for entry in listed or () if isinstance(entry, dict)]
            found = [version for name in names if (version := Version.parse(name)) and version.run == self._run]
            return max(found, default=None)
        path = "/weight_info" if self._server.kind == "vllm" else "/model_info"
        return Version.parse(str((await client.control(path)).get("weight_version")))

    def _versions(self) -> list[Version | None]:
        return [self._in_client(url, self._version) for url in self._urls]

    def _in_client(self, url: str, work: Callable[[ServerClient], Any]) -> Any:
        return self._in_clients([url], work)[0]

    def _in_clients(
        self,
        urls: Sequence[str],
        work: Callable[[ServerClient], Awaitable[Any]],
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Any]:
        async def run(url: str) -> Any:
            log_once = lambda topic, line: self._log(line)  # noqa: E731
            async with ServerClient(self._settings.of_url(url), self._log, log_once) as client:
                return await work(client)

        return run_until_stopped(gather_or_cancel(map(run, urls)), should_stop or self._should_stop, STOPPED)


def _check_endpoints(server: ServerInfo, settings: RolloutSettings, is_adapter: bool) -> None:
    """Raise ServerError for a server that cannot load weights, or an adapter."""
    of_server, urls, kind = settings.server, ", ".join(settings.server.urls), server.kind
    sends, lora = of_server.transfer == "broadcast", "model.lora is set"
    # What vLLM alone can do, whether an adapter forbids it, and the remedy.
    for is_wanted, wanted, without_adapter, remedy in (
        (sends, "rollout.server.transfer is broadcast", True, "Set rollout.server.transfer=folder."),
        (settings.interrupts, f"rollout.in_flight is {settings.in_flight}", True, "Set rollout.in_flight=finish."),
        (of_server.sleep, "rollout.server.sleep is true", False, "Set rollout.server.sleep=false."),
        (is_adapter, lora, False, "Set model.lora=null, or rollout.engine=in_process."),
    ):
        if is_wanted and (kind != "vllm" or (is_adapter and without_adapter)):
            cause = f"the server at {urls} is of kind {kind}" if kind != "vllm" else lora
            needs = f"which takes vLLM{' and whole weights' if without_adapter else ''}"
            raise ServerError(f"{wanted}, {needs}, and {cause}. {remedy}")
    if kind not in ENDPOINTS:
        raise ServerError(
            f"The server at {urls} is of kind {kind}, which cannot load the weights of a run. Use vLLM or SGLang, or "
            "set rollout.server.weights=keep to train on what its own weights sample."
        )
    needed = ADAPTER_ENDPOINTS if is_adapter else ENDPOINTS[kind]
    extra = (
        (of_server.sleep, SLEEP_ENDPOINTS),
        (sends, BROADCAST_ENDPOINTS),
        (settings.interrupts, INTERRUPT_ENDPOINTS),
    )
    needed = needed.union(*(endpoints for is_wanted, endpoints in extra if is_wanted))
    if lacking := sorted(needed - server.paths):
        flags = "VLLM_SERVER_DEV_MODE=1" + (" and --enable-scale-out" if settings.interrupts else "")
        if is_adapter:
            flags = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        how = f"Start it with {flags} (vLLM {TESTED_VLLM} was tested). " if kind == "vllm" else ""
        raise ServerError(
            f"The server at {urls} ({kind}) lacks {', '.join(lacking)}, which loading the weights of a run takes. "
            f"{how}Or set rollout.server.weights=keep to train on what the weights it has sample."
        )
