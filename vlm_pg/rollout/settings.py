"""How answers are sampled."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from vlm_pg.settings import Settings


class ServerSettings(Settings):
    """Section ``rollout.server``: an OpenAI-compatible server that samples instead of this process."""

    url: str | None = Field(None, description="Base URL with its version, for example http://127.0.0.1:8000/v1.")
    model: str | None = Field(None, description="Model name the server knows; default: the first one it lists.")
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        description="Environment variable with the key, sent as bearer token; the key is never stored.",
    )
    timeout_seconds: float = Field(600.0, gt=0.0, description="Longest wait for one whole answer.")
    max_answer_mb: float = Field(64.0, gt=0.0, description="Longest answer, unpacked, in MiB.")
    retries: int = Field(3, ge=0, description="Times a request that failed is sent again.")
    wait_seconds: float = Field(
        120.0, ge=0.0, description="A server that does not answer is waited for this long before the run stops."
    )
    max_divergence: float | None = Field(
        0.5,
        gt=0.0,
        description="The run stops where the log-probabilities of a server that tells them differ from the trainer's "
        "by a larger KL, in nats a token; null: never.",
    )
    concurrency: int = Field(16, ge=1, description="Requests in flight at a time.")

    @field_validator("url")
    @classmethod
    def _url_is_a_base_url(cls, value: str | None) -> str | None:
        """The value itself is not shown: it may hold a password."""
        if value is not None and not _is_base_url(value):
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
        "in_process", description="in_process: the policy itself; server: an OpenAI-compatible one, see rollout.server."
    )
    num_generations: int = Field(8, ge=1, le=1024, description="Rollouts per question, G.")
    max_new_tokens: int = Field(768, ge=1, description="Longest response, in tokens, the stop token included.")
    min_new_tokens: int = Field(0, ge=0, description="No response stops before it has this many tokens.")
    temperature: float = Field(1.0, ge=0.0, le=100.0, description="Softmax temperature; 0 is greedy (evaluation only).")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Keep the smallest set of tokens with this probability.")
    top_k: int = Field(0, ge=0, description="Keep the k most probable tokens; 0 keeps all.")
    min_p: float = Field(
        0.0, ge=0.0, le=1.0, description="Keep tokens at least this probable relative to the most probable one."
    )
    repetition_penalty: float = Field(
        1.0, gt=0.0, description="Divides positive and multiplies negative logits of tokens already in the sequence."
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2.0,
        le=2.0,
        description="Taken, once, from the logit of every token that the response has already; the prompt's do not "
        "count.",
    )
    stop_token_ids: tuple[int, ...] = Field((), description="End a response, besides the model's own end tokens.")
    stop_strings: tuple[str, ...] = Field((), description="A response ends with the token that completes one of them.")
    max_batch_rollouts: int = Field(
        256, ge=1, description="Rollouts decoded together; several groups are decoded in one batch up to this number."
    )
    memory_gb: float | None = Field(
        None,
        gt=0.0,
        description="GiB for keys and values of prefixes and responses; default: 60% of what is free when it starts.",
    )
    cuda_graphs: bool = Field(
        True, description="On CUDA a decode step is recorded once and replayed, where the model's step can be recorded."
    )
    fused_kernels: bool = Field(
        True,
        description="On CUDA all of a decode step but matrix products and attention to prompts runs on Triton kernels, "
        "norms and gates of a prefill too, each where its error is no larger than that of transformers' modules.",
    )
    prefill_tokens: int = Field(
        16384, ge=64, description="Prompt tokens a prefill pass; longer prompts take several (on CUDA from 1/16 more)."
    )
    merge_adapter: bool | Literal["auto"] = Field(
        "auto",
        description="Whether a LoRA adapter is merged into the weights while answers are sampled, which are restored "
        "bit for bit afterwards. auto: on CUDA, where another copy of the adapted layers fits into memory.",
    )
    split: Literal["auto", "questions", "prompts"] = Field(
        "auto",
        description="With training.sequence_parallel: how the processes that share an update share its generation. "
        "questions: each samples whole groups of its own questions. prompts: all prefill every prompt together, and "
        "each samples its part of every group. auto: questions where there are as many as processes.",
    )
    divide_prefix: Literal["auto", "always", "never"] = Field(
        "auto",
        description="With training.sequence_parallel: whether each process keeps its part of a prompt's keys and "
        "values while the rollouts are decoded, and answers the others' queries. auto: where a prompt does not fit "
        "into the memory of one process whole.",
    )
    gather: Literal["auto", "all", "layers"] = Field(
        "auto",
        description="Under ZeRO-3: all weights gathered once for generation, or layer by layer with the ranks in step; "
        "auto: all if they fit.",
    )
    logprobs: Literal["reuse", "recompute"] = Field(
        "reuse", description="Log-probabilities of the sampling policy in the loss: of generation, or the update's own."
    )
    mismatch_every: int = Field(50, ge=0, description="Compare the two and log the difference every N steps; 0 never.")
    server: ServerSettings = Field(default_factory=ServerSettings, description="The server, where one samples.")

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
        return problems


SHARE_OF_FREE = 0.6
