"""The evaluation sets of a configuration: their questions, wording, sampling and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.bad import BadSampleLog
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError
from vlm_pg.eval.aggregation import aggregate
from vlm_pg.eval.answer_files import refuse_equal_files
from vlm_pg.eval.contracts import Answered, Output, Reading
from vlm_pg.eval.protocols.protocol import Protocol
from vlm_pg.eval.settings import Control, EvalSettings
from vlm_pg.eval.wording import wording_of
from vlm_pg.media.controls import repeat_frame, shuffle_frames
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import PromptOptions, Tamper
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, Sample

# A control asks each question once with each of these; its accuracy is their mean.
TAMPERS: dict[Control, tuple[Tamper, ...]] = {
    "frames_shuffled": (shuffle_frames,),
    "frame_repeated": tuple(partial(repeat_frame, turn=turn, turns=4) for turn in range(4)),
}


@dataclass(frozen=True)
class EvalSet:
    """One set of questions, or a control on it. ``name`` is what results are reported under.

    ``protocol``: how it is worded, sampled, read and averaged; None: as the configuration says. ``num_excluded``:
    questions of the records that the protocol does not report.
    """

    name: str
    records: Path
    samples: tuple[Sample, ...]
    kind: str = "eval"
    tampers: tuple[Tamper | None, ...] = (None,)
    protocol: Protocol | None = None
    num_excluded: int = 0

    def rollout(self, config: RunConfig) -> RolloutSettings:
        """How its answers are sampled."""
        if self.protocol is not None:
            return config.rollout.model_copy(update=self.protocol.rollout_changes())
        changes = config.eval.model_dump(include={"num_generations", "temperature", "top_p"})
        return config.rollout.model_copy(update={**changes, "top_k": 0})

    def seed(self, config: RunConfig) -> int:
        """The seed of all random numbers of its answers."""
        own = None if self.protocol is None else self.protocol.sampling.seed
        return config.run.seed if own is None else own

    def media(self, config: RunConfig) -> MediaSettings:
        """How its media are shown."""
        return config.media if self.protocol is None else self.protocol.media_settings(config.media)

    def prompt(self, config: RunConfig) -> PromptSettings:
        """The length limit of its prompts, and whether subtitles are read."""
        return config.prompt if self.protocol is None else self.protocol.prompt_settings(config.prompt)

    def asking(self, config: RunConfig, policy: Policy | WeightlessPolicy) -> PromptOptions | None:
        """Media settings, builder and check of its prompts; None: those of all other sets."""
        protocol = self.protocol
        if protocol is None:
            return None

        def check(prompt: Prompt) -> None:
            policy.check_length(prompt, protocol.max_new_tokens)

        settings = self.prompt(config)
        wording, prefix = wording_of(protocol), protocol.answer_prefix
        builder = PromptBuilder(policy.processor, settings, policy.positions, wording=wording, answer_prefix=prefix)
        return PromptOptions(self.media(config), builder, check)

    @property
    def aggregation(self) -> str:
        """The name of its aggregation."""
        return "mean" if self.protocol is None else self.protocol.aggregation

    def figures(
        self, answered: Sequence[Answered], reader: str, formats: Iterable[float | None] = ()
    ) -> dict[str, Any]:
        """All figures of the set, as results have them; ``accuracy`` is the one that is cited.

        Args:
            answered: all of its questions.
            reader: the name of the reader (``readers.py``).
            formats: of each output, whether it has the format that training rewards.

        Raises:
            VlmPgError: as ``aggregate``.
        """
        categories = () if self.protocol is None else self.protocol.categories
        figures = aggregate(self.aggregation, answered, formats, categories).to_row()
        figures |= {"kind": self.kind, "n_not_asked": self.num_excluded, "reader": reader}
        if self.kind == "control":
            # Its outputs are to different frames: passing one of them says nothing, and they have no majority.
            figures |= {"pass_at_k": {}, "majority_at_k": {}}
        return figures

    def check_details(self) -> None:
        """Refuse a set, before any question is asked, whose questions lack what its figures are made by.

        Raises:
            VlmPgError: as ``aggregate``.
        """
        placeholder = (Output("", Reading(None, 0.0)),)
        aggregate(self.aggregation, [Answered.of(sample, placeholder) for sample in self.samples])


def read_sets(
    config: RunConfig, policy: Policy | WeightlessPolicy, console: Console, bad_log: BadSampleLog | None
) -> list[EvalSet]:
    """The chosen sets, each followed by its controls; what is left out is logged."""
    sets: list[EvalSet] = []
    settings, files = config.eval, config.data.eval
    for key, names in (("eval.control_sets", settings.control_sets), ("eval.headline_set", [settings.headline_set])):
        left_out = [name for name in names or () if name is not None and name not in settings.chosen_sets([name])]
        if left_out:
            console.info(f"{key}: {', '.join(left_out)} is left out by eval.sets={list(settings.sets or ())}")
    for name in settings.chosen_sets(list(files)):
        records, protocol = files[name], settings.protocol_of(name)
        samples, bad = read_records(records)
        if bad_log is not None:
            bad_log.record_file(bad, len(samples) + len(bad))
        reported = settings.reported_questions(name, samples)
        if not reported:
            raise ConfigError(
                f"Protocol {settings.protocols[name]} asks none of the {len(samples):,} questions of {records}. It is "
                f"for records of 'vlm-pg prepare {protocol.pipeline if protocol else name}'. Correct eval.protocols."
            )
        chosen = tuple(reported[: settings.limit])
        if len(chosen) < len(reported):
            console.info(
                f"{name}: eval.limit={settings.limit}, the first {len(chosen):,} of {len(reported):,} questions"
            )
        policy.check_samples(chosen, records)
        sets.append(EvalSet(name, records, chosen, protocol=protocol, num_excluded=len(samples) - len(reported)))
        if protocol is not None:
            _introduce(sets[-1], protocol, console)
        sets += _controls(sets[-1], settings, console)
    refuse_equal_files([item.name for item in sets], "answers")
    return sets


def _introduce(item: EvalSet, protocol: Protocol, console: Console) -> None:
    sampling = protocol.sampling
    console.info(f"{item.name}: protocol {protocol.name} ({protocol.source}); {len(item.samples):,} questions")
    console.info(
        f"{item.name}: {sampling.num_generations} answer(s) each at temperature {sampling.temperature:g}, at most "
        f"{protocol.max_new_tokens:,} tokens; eval.num_generations, temperature and top_p, frames and sizes of media, "
        "and the texts of prompt do not count here"
    )
    if item.num_excluded:
        console.info(
            f"{item.name}: {item.num_excluded:,} questions of other types are not part of it and are not asked"
        )
    if protocol.differs:
        console.warn(f"{item.name}: {protocol.differs}")


def _controls(item: EvalSet, settings: EvalSettings, console: Console) -> list[EvalSet]:
    name = item.name
    if not settings.controls or (settings.control_sets is not None and name not in settings.control_sets):
        return []
    if not any(ref.kind == "video" for sample in item.samples for ref in sample.media):
        console.info(f"eval.controls: not run on {name}, which has no video whose frames could be moved")
        return []
    return [
        EvalSet(f"{name} ({control})", item.records, item.samples, "control", TAMPERS[control], item.protocol)
        for control in settings.controls
    ]
