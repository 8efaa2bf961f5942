"""Settings of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from vlm_pg.eval.protocols.protocol import Protocol, load_protocol
from vlm_pg.settings import Settings
from vlm_pg.types import Sample

if TYPE_CHECKING:  # it imports torch, which reading a configuration does not need
    from vlm_pg.prompts.builder import Wording

Control = Literal["frames_shuffled", "frame_repeated"]
NO_SETS = "The configuration names no evaluation sets. Add them as data.eval.NAME=PATH, files of prepared records."


class EvalJudgeSettings(Settings):
    """Section ``eval.judge``: a language model behind an OpenAI-compatible URL, asked about outputs that the rules
    could not read and texts that they call wrong. Figures of the rules stay; those with the judge stand beside them."""

    url: str | None = Field(
        None, description="Base URL including the version, for example http://127.0.0.1:8000/v1; null: no judge."
    )
    model: str | None = Field(None, description="Model name at the server; default: the first one it lists.")
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the key, sent as bearer token; the key is never stored.",
    )
    timeout_seconds: float = Field(120.0, gt=0.0, description="Time limit for one decision; on timeout there is none.")
    retries: int = Field(2, ge=0, description="How often a failed request is repeated.")
    concurrency: int = Field(16, ge=1, description="Maximum number of concurrent requests.")
    max_output_characters: int = Field(
        20_000, ge=100, description="Longest output that is shown to the judge; longer ones count as undecided."
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")):
            raise ValueError(
                f"is {value!r}. The base URL of an OpenAI-compatible server is expected, for example "
                "http://127.0.0.1:8000/v1. Correct it, or set eval.judge.url=null for no judge."
            )
        if "@" in urlsplit(value).netloc:
            raise ValueError(
                "has a name or a password in it, which results would show. Leave them out, and put the key into the "
                "environment variable that eval.judge.api_key_variable names."
            )
        return value


class EvalSettings(Settings):
    """Section ``eval``. The sets themselves are listed under ``data.eval``."""

    num_generations: int = Field(1, ge=1, description="Rollouts per question for mean@n and pass@k.")
    temperature: float = Field(0.0, ge=0.0, description="Softmax temperature; 0 is greedy and needs num_generations=1.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Sample from the smallest set of tokens with at least this total probability."
    )
    limit: int | None = Field(None, ge=1, description="Use only the first questions of each set.")
    before: bool = Field(True, description="Evaluate before training.")
    after: bool = Field(True, description="Evaluate after training.")
    every: int = Field(0, ge=0, description="Evaluate every N training steps; 0: never.")
    sets: tuple[str, ...] | None = Field(None, description="Names of data.eval sets to evaluate; default: all.")
    controls: tuple[Control, ...] = Field(
        (),
        description="Also evaluate sets (control_sets) with modified frames: shuffled in time, or one frame repeated. "
        "A model that uses temporal evidence falls to chance accuracy.",
    )
    control_sets: tuple[str, ...] | None = Field(
        None, description="Names of the sets that the controls run on; default: all evaluated sets."
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="For vlm-pg eval. auto: continue an interrupted evaluation if everything that determines its "
        "answers is unchanged. never: move it aside and start anew.",
    )
    judge: EvalJudgeSettings = Field(
        default_factory=EvalJudgeSettings,
        description="For vlm-pg eval: a language model that judges answers in addition to the rules.",
    )
    lmms_samples: bool = Field(False, description="For vlm-pg eval: also write answers in lmms-eval's sample format.")
    thumbnails: int = Field(
        200, ge=0, description="For vlm-pg eval: number of questions per set whose frames are saved as pictures."
    )
    protocols: dict[str, str] = Field(
        default_factory=dict,
        description="Protocol of a set (prompt wording, sampling, answer extraction, aggregation), by its name in "
        "data.eval: the name of a bundled protocol such as video_mme/official, or the path of a YAML file. Sets left "
        "out use the configuration.",
    )
    reader: Literal["strict", "ours", "published"] | None = Field(
        None,
        description="Answer extractor. strict: training's, which reads the answer block. ours: one for whole outputs. "
        "published: the rule that the set's protocol names, including its bugs. Default: ours with a protocol (unless "
        "it names your own reader), else strict.",
    )
    headline_set: str | None = Field(
        None, description="The set whose accuracy is the run's headline; default: the first evaluated set."
    )

    @field_validator("protocols")
    @classmethod
    def _protocols_load(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value.values():
            load_protocol(name)
        return value

    def protocol_of(self, name: str) -> Protocol | None:
        """The protocol of the set ``name``; None: it goes by the configuration."""
        return load_protocol(self.protocols[name]) if name in self.protocols else None

    def reported_questions(self, name: str, samples: Sequence[Sample]) -> list[Sample]:
        """The set's questions that its protocol includes, with the media that it shows, whatever ``limit`` is."""
        protocol = self.protocol_of(name)
        if protocol is None:
            return list(samples)
        return [protocol.with_shown_media(one) for one in samples if protocol.includes(one)]

    def wording_of(self, name: str) -> Wording | None:
        """The words of that protocol; None: of section ``prompt``."""
        from vlm_pg.eval.wording import wording_of  # imports decoders' arrays, which reading a config does not need

        protocol = self.protocol_of(name)
        return None if protocol is None else wording_of(protocol)

    def chosen_sets(self, known: Sequence[str]) -> list[str]:
        """Those of the ``known`` sets that are evaluated, in their order."""
        return [name for name in known if self.sets is None or name in self.sets]

    def left_out(self, known: Sequence[str]) -> list[str]:
        """Lines about questions of the ``known`` sets that are not asked."""
        others = [name for name in known if name not in self.chosen_sets(known)]
        lines = [f"eval.sets: left out are the evaluation sets {', '.join(others)}"] if others else []
        if self.judge.url is not None and known:
            lines.append("eval.judge: asked by vlm-pg eval alone; evaluations between steps go by the rules")
        if self.limit is not None and known:
            lines.append(f"eval.limit: only the first {self.limit:,} usable records of each evaluation set are asked")
        return lines

    def impossible(self) -> list[str]:
        without = [name for name, protocol in self.protocols.items() if load_protocol(protocol).reader == "ours"]
        checks = (
            (
                self.reader == "published" and bool(without),
                f"eval.reader is published, and the protocols of {', '.join(without)} name no published rule of "
                "reading. Choose protocols that do, or eval.reader=ours.",
            ),
            (
                self.reader == "published" and not self.protocols,
                "eval.reader is published, and eval.protocols names no protocol whose rule could be meant. Name one "
                "for each set, or choose eval.reader=ours.",
            ),
            (
                self.temperature == 0.0 and self.num_generations > 1,
                f"eval.temperature is 0 and eval.num_generations is {self.num_generations}: greedy rollouts are all "
                "alike. Set eval.num_generations=1, or eval.temperature above 0.",
            ),
            (
                bool(self.control_sets) and not self.controls,
                f"eval.control_sets is {list(self.control_sets or ())} and eval.controls is empty, so that nothing "
                "would run on them. Set eval.controls=[frames_shuffled,frame_repeated], or eval.control_sets=null.",
            ),
            (
                self.control_sets == () and bool(self.controls),
                f"eval.controls is {list(self.controls)} and eval.control_sets is empty, so that they would run on "
                "nothing. Name sets in eval.control_sets, or set it to null for all.",
            ),
        )
        return [message for impossible, message in checks if impossible]
