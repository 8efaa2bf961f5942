"""How answers are sampled."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from vlm_pg.settings import Settings

# The development endpoints of a server can replace its weights and have no authentication.
LOOPBACK = ("127.0.0.1", "localhost")


class LaunchSettings(Settings):
    """Section ``rollout.server.launch``: servers that ``vlm-pg serve`` starts on this machine."""

    engine: Literal["vllm", "vlm_pg"] = Field(
        "vllm", description="vllm: vLLM. vlm_pg: the engine of rollout.engine=in_process, in processes of its own."
    )
    executable: str = Field(
        "vllm", description="Command or path; vLLM pins its own torch, so it may be in another environment."
    )
    num_servers: int = Field(
        1, ge=1, le=64, description="Number of servers, at rollout.server.url and the ports that follow it."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="GPUs of each server. The servers get the last num_servers x tensor_parallel_size of this "
        "machine's GPUs (CUDA_VISIBLE_DEVICES), training the others (all with rollout.server.sleep).",
    )
    host: str = Field(
        LOOPBACK[0],
        description="Address to bind. Whoever reaches it can replace the servers' weights; set it only for training on "
        "other nodes, to an address of a private network.",
    )
    arguments: tuple[str, ...] = Field(
        (), description="Further arguments of vllm serve; they override those that are set for you."
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Further environment variables of the servers. They are stored in the run's config.yaml.",
    )
    start_seconds: float = Field(
        1800.0, gt=0.0, description="Time limit until all servers are healthy, loading and compilation included."
    )


class ServerSettings(Settings):
    """Section ``rollout.server``: an OpenAI-compatible server that samples instead of this process."""

    url: str | None = Field(None, description="Base URL including the version, for example http://127.0.0.1:8000/v1.")
    replicas: tuple[str, ...] = Field(
        (), description="Base URLs of further servers with the same model; questions are divided over all of them."
    )
    weights: Literal["push", "keep"] = Field(
        "push",
        description="push: before each step the server loads the run's present weights, and a probe shows that it "
        "samples from them (vLLM with VLLM_SERVER_DEV_MODE=1, SGLang, vlm_pg). keep: the server keeps the "
        "weights it was started with; it must report log-probabilities.",
    )
    transfer: Literal["folder", "broadcast"] = Field(
        "folder",
        description="How pushed weights reach the servers. folder: as files in weights_folder. broadcast: from rank 0 "
        "over a process group with vLLM's workers (gloo, on GPUs NCCL), for which vLLM is started with the engine in "
        "vlm_pg/rollout/server/vllm_plugin; not with model.lora.",
    )
    weights_folder: str | None = Field(
        None,
        description="Folder for the weights that servers load, which they see under the same path (on one machine for "
        "example below /dev/shm); default: weights/ in the run's folder.",
    )
    sleep: bool = Field(
        False,
        description="Let vLLM sleep while the trainer updates, so that both may use the same GPUs. Needs vLLM's "
        "--enable-sleep-mode and weights=push.",
    )
    max_probe_divergence: float | None = Field(
        None,
        gt=0.0,
        description="Largest accepted KL, in nats per token, between the log-probabilities of server and trainer on "
        "the probe after weights were loaded; default: 1e-7 if the trainer computes in fp32, else 0.02.",
    )
    launch: LaunchSettings | None = Field(
        None,
        description="Servers that vlm-pg serve (and scripts/train_video.sh) starts on this machine; null: they are "
        "started otherwise.",
    )
    model: str | None = Field(None, description="Model name at the server; default: the first one it lists.")
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        description="Environment variable that holds the key, sent as bearer token; the key is never stored.",
    )
    timeout_seconds: float = Field(600.0, gt=0.0, description="Time limit for one complete response.")
    max_answer_mb: float = Field(
        64.0, gt=0.0, description="Maximum size of a response body after decompression, in MiB."
    )
    retries: int = Field(3, ge=0, description="How often a failed request is repeated.")
    wait_seconds: float = Field(
        120.0, ge=0.0, description="How long to wait for a server that is down before the run stops."
    )
    max_divergence: float | None = Field(
        0.5,
        gt=0.0,
        description="The run stops if the KL between the server's log-probabilities, if it reports them, and the "
        "trainer's is larger, in nats per token; null: never.",
    )
    concurrency: int = Field(16, ge=1, description="Maximum number of concurrent requests.")

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of all servers."""
        return (self.launched_urls or (() if self.url is None else (self.url,))) + self.replicas

    @property
    def launched_urls(self) -> tuple[str, ...]:
        """Base URLs of the servers that ``launch`` starts, at consecutive ports."""
        parts = urlsplit(self.url or "")
        if self.launch is None or parts.port is None:
            return ()
        ports = range(parts.port, parts.port + self.launch.num_servers)
        return tuple(f"http://{parts.hostname}:{port}{parts.path}" for port in ports)

    def of_url(self, url: str) -> ServerSettings:
        """The settings for one of several servers."""
        return self.model_copy(update={"url": url, "replicas": (), "launch": None})

    @field_validator("url", "replicas")
    @classmethod
    def _urls_are_base_urls(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """The value itself is not shown: it may hold a password."""
        if not all(map(_is_base_url, (value,) if isinstance(value, str) else value or ())):
            raise ValueError(
                "the URL must be http:// or https:// with a host, a port up to 65535 if any, and a path; without user "
                "name, password, query, fragment and spaces. For example http://127.0.0.1:8000/v1. A key belongs into "
                "the environment variable that rollout.server.api_key_variable names."
            )
        return value

    @field_validator("api_key_variable")
    @classmethod
    def _variable_is_a_name(cls, value: str) -> str:
        """The value itself is not shown: it may be a key."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise ValueError(
                "this must be the name of an environment variable, such as OPENAI_API_KEY, and not the key itself."
            )
        return value


def _is_base_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:  # brackets that do not match, or no such port
        return False
    unwanted = any((parts.username, parts.password, parts.query, parts.fragment)) or "@" in parts.netloc
    plain = value.isascii() and value.isprintable() and " " not in value
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and plain and not unwanted


class RolloutSettings(Settings):
    """Section ``rollout``."""

    engine: Literal["in_process", "server"] = Field(
        "in_process",
        description="What samples rollouts. in_process: the policy itself. server: an OpenAI-compatible server, see "
        "rollout.server.",
    )
    num_generations: int = Field(8, ge=1, le=1024, description="Rollouts per question, G.")
    max_new_tokens: int = Field(768, ge=1, description="Maximum response length in tokens, including the stop token.")
    min_new_tokens: int = Field(0, ge=0, description="Minimum response length in tokens.")
    temperature: float = Field(1.0, ge=0.0, le=100.0, description="Softmax temperature; 0 is greedy (evaluation only).")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Sample from the smallest set of tokens with at least this total probability."
    )
    top_k: int = Field(0, ge=0, description="Sample from the k most probable tokens; 0: from all.")
    min_p: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Sample from tokens that have at least this share of the probability of the most probable one.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0.0,
        description="Divides the positive and multiplies the negative logits of tokens that are already in the "
        "sequence.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted once from the logit of every token that is already in the response; tokens of the "
        "prompt do not count.",
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), description="Tokens that end a response, in addition to the model's own."
    )
    stop_strings: tuple[str, ...] = Field(
        (), description="A response ends with the token that completes one of these strings."
    )
    max_batch_rollouts: int = Field(
        256, ge=1, description="Maximum number of rollouts decoded together; a batch may have several groups."
    )
    memory_gb: float | None = Field(
        None,
        gt=0.0,
        description="GiB for keys and values of prefixes and responses; default: 60 % of the memory that is free when "
        "generation starts.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On CUDA, capture the decode step as a CUDA graph and replay it, if the model's step can be "
        "captured.",
    )
    fused_kernels: bool = Field(
        True,
        description="On CUDA, run all of a decode step except matrix products and attention to prompts on fused Triton "
        "kernels, and the norms and gates of a prefill too. Each kernel is used only if its error is no larger than "
        "that of the transformers module it replaces.",
    )
    prefill_tokens: int = Field(
        16384,
        ge=64,
        description="Prompt tokens per prefill pass; longer prompts take several passes (on CUDA, a prompt up to 1/16 "
        "longer still takes one).",
    )
    merge_adapter: bool | Literal["auto"] = Field(
        "auto",
        description="Merge a LoRA adapter into the weights during sampling; the weights are restored bit for bit "
        "afterwards. auto: on CUDA, if a second copy of the adapted layers fits in memory.",
    )
    split: Literal["auto", "questions", "prompts"] = Field(
        "auto",
        description="With training.sequence_parallel: how the processes that share an update divide generation. "
        "questions: each process samples whole groups for its own questions. prompts: all processes prefill every "
        "prompt together, and each samples a part of every group. auto: questions, if there are at least as many "
        "questions as processes.",
    )
    divide_prefix: Literal["auto", "always", "never"] = Field(
        "auto",
        description="With training.sequence_parallel: whether each process keeps only its part of a prompt's keys and "
        "values during decoding and computes attention to it for the others. auto: if a whole prompt does not fit in "
        "the memory of one process.",
    )
    gather: Literal["auto", "all", "layers"] = Field(
        "auto",
        description="Under ZeRO-3: gather all weights once for generation (all), or layer by layer with all ranks in "
        "step (layers). auto: all, if they fit.",
    )
    logprobs: Literal["reuse", "recompute"] = Field(
        "reuse",
        description="Which log-probabilities of the sampling policy the loss uses. reuse: those computed in "
        "generation. recompute: those of the training forward.",
    )
    keep_forward_gb: float | None = Field(
        None,
        ge=0.0,
        description="GiB for what the layers compute while rollouts are sampled, from which the first update of a step "
        "starts instead of computing its forward again; 0: off; default: what the update leaves free at the start, up "
        "to half of it, and behind a GPU a quarter of the free host memory.",
    )
    mismatch_every: int = Field(
        50,
        ge=0,
        description="Compare the log-probabilities of generation and training every N steps and log the difference; 0: "
        "never.",
    )
    staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="With engine=server: sample up to so many steps ahead while the trainer updates. A step's rollouts "
        "come from weights that are at most so many updates old. 0: sampling and updates alternate.",
    )
    in_flight: Literal["finish", "continue", "redo"] = Field(
        "finish",
        description="With staleness: what becomes of rollouts that are being sampled when an update is done. finish: "
        "the server gets the new weights once no rollout is being sampled. continue: at once, and such rollouts go on "
        "under them (partial rollouts; each token's weights are recorded). redo: at once, and such rollouts are "
        "sampled anew. The last two need vLLM with --enable-scale-out and --mm-processor-cache-gb 0.",
    )
    server: ServerSettings = Field(default_factory=ServerSettings, description="The server, with engine=server.")

    @property
    def interrupts(self) -> bool:
        """Whether servers get new weights while they sample."""
        return self.in_flight != "finish"

    @property
    def extras(self) -> dict[str, float]:
        """Settings beyond OpenAI's that are not neutral, by name: a server of unknown kind may ignore them, others may
        report log-probabilities before or after they are applied."""
        neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "min_new_tokens": 0}
        return {name: getattr(self, name) for name, value in neutral.items() if getattr(self, name) != value}

    @model_validator(mode="after")
    def _fitting(self) -> RolloutSettings:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"rollout.min_new_tokens is {self.min_new_tokens}, above rollout.max_new_tokens "
                f"{self.max_new_tokens}; lower one or raise the other."
            )
        return self

    def impossible(self) -> list[str]:
        problems = []
        if self.temperature == 0.0:
            problems.append(
                "rollout.temperature is 0, which makes all rollouts of a group alike. Training needs a temperature "
                "above 0. Set rollout.temperature=1.0; greedy evaluation is eval.temperature=0."
            )
        if self.engine == "server" and self.server.url is None:
            problems.append(
                "rollout.engine is server and rollout.server.url is not set. Give the base URL with its version, for "
                "example rollout.server.url=http://127.0.0.1:8000/v1."
            )
        if self.staleness and (self.engine != "server" or self.server.weights == "keep" or self.server.sleep):
            problems.append(
                f"rollout.staleness is {self.staleness}: only a server can sample while the trainer updates, with "
                "weights that are pushed to it, and without sleep. Set rollout.engine=server, "
                "rollout.server.weights=push and rollout.server.sleep=false, or rollout.staleness=0."
            )
        if self.interrupts and not self.staleness:
            problems.append(
                f"rollout.in_flight is {self.in_flight} and rollout.staleness is 0, where nothing is sampled during an "
                "update. Set rollout.staleness=1, or leave rollout.in_flight out."
            )
        if self.server.sleep and self.server.weights == "keep":
            problems.append(
                "rollout.server.sleep is true and rollout.server.weights is keep: a server that sleeps gives up its "
                "weights, and is not given new ones. Set rollout.server.weights=push or rollout.server.sleep=false."
            )
        if self.server.sleep and self.server.transfer == "broadcast":
            problems.append(
                "rollout.server.sleep is true and rollout.server.transfer is broadcast: NCCL connects no two processes "
                "on one GPU. Set rollout.server.transfer=folder, or rollout.server.sleep=false on GPUs of its own."
            )
        return problems + _launch_faults(self)


def _launch_faults(rollout: RolloutSettings) -> list[str]:
    """What ``rollout.server.launch`` does not go with."""
    launch, url = rollout.server.launch, rollout.server.url
    if launch is None:
        return []
    problems = []
    if rollout.engine != "server":
        problems.append(
            f"rollout.server.launch is set and rollout.engine is {rollout.engine}, which samples without servers. Set "
            "rollout.engine=server or rollout.server.launch=null."
        )
    if launch.engine == "vlm_pg":
        of_vllm = {
            "launch.executable": launch.executable != "vllm",
            "launch.tensor_parallel_size": launch.tensor_parallel_size > 1,
            "launch.arguments": launch.arguments,
            "sleep": rollout.server.sleep,
            "transfer=broadcast": rollout.server.transfer == "broadcast",
        }
        unread = [f"rollout.server.{name}" for name, is_set in of_vllm.items() if is_set]
        if unread := unread + (["rollout.in_flight"] if rollout.interrupts else []):
            problems.append(
                f"rollout.server.launch.engine is vlm_pg, and {', '.join(unread)} is for vLLM. Leave that out, or set "
                "rollout.server.launch.engine=vllm."
            )
    if url is None:
        return problems
    parts = urlsplit(url)
    last_port = (parts.port or 0) + launch.num_servers - 1
    if parts.scheme != "http" or parts.port is None or last_port > 65535 or parts.path.rstrip("/") != "/v1":
        problems.append(
            f"rollout.server.url is {url}, and rollout.server.launch starts {launch.num_servers} servers there: "
            "it must be http://HOST:PORT/v1, with free ports up to 65535 from PORT on. For example "
            "http://127.0.0.1:8000/v1."
        )
    if launch.host in LOOPBACK and parts.hostname not in LOOPBACK:
        problems.append(
            f"rollout.server.url is {url}, and the servers of rollout.server.launch bind {launch.host}, where only "
            "this machine reaches them. Set rollout.server.url=http://127.0.0.1:8000/v1; or, for training on several "
            "nodes in a private network, rollout.server.launch.host to an address of this machine."
        )
    return problems


SHARE_OF_FREE = 0.6
