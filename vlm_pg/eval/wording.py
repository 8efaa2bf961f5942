"""The words of a question as a protocol has them, and which subtitles are among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from vlm_pg.errors import SampleError
from vlm_pg.eval.protocols.protocol import DETAILS, OptionStyle, Protocol, SubtitleRule, detail_text
from vlm_pg.prompts.chat import Turn, marked, marked_question, with_media
from vlm_pg.types import Cue, DecodedMedia, Sample

_LETTERED: dict[OptionStyle, str] = {"A. text": "{}. {}", "(A) text": "({}) {}", "A: text": "{}: {}"}
# Written in place of subtitles for a video that has no file of them (lmms-eval, videomme_doc_to_text_subtitle).
_NO_FILE = "No subtitles available"


def words(
    protocol: Protocol, sample: Sample, subtitle_cues: Sequence[Cue], frame_seconds: Sequence[float]
) -> tuple[str, str]:
    """System message and user's turn of a question, word for word.

    Args:
        subtitle_cues: of its video, in order; () where it has no file of them.
        frame_seconds: times of the frames that are shown, on the same clock.

    Returns:
        (system, user); "" for no system message. ``user`` is as ``with_media`` takes it.

    Raises:
        SampleError: ``not_asked`` for a type of question that the protocol has no template for, ``lacks_detail`` where
            its template names what the sample's details do not have.
    """
    template = protocol.template_for(sample)
    if template is None:
        came = ", ".join(f"{key} {value!r}" for key, value in zip(protocol.template_by, protocol.question_type(sample)))
        raise SampleError(
            "not_asked",
            f"protocol {protocol.name} has no template for {came}. It has {', '.join(protocol.templates)}. Leave the "
            "question out, or choose a protocol that asks it.",
        )
    subtitles = shown_subtitles(protocol.subtitles, sample, subtitle_cues, frame_seconds)
    question = sample.question
    for part in protocol.without:
        question = question.replace(part, "").strip()

    def value(placeholder: str, is_optional: bool) -> str:
        if placeholder.startswith(DETAILS):
            key = placeholder.removeprefix(DETAILS)
            return "" if is_optional and key not in sample.details else _detail(protocol, sample, key)
        return {
            "question": marked_question(question),
            "options": "\n".join(marked(restyled(option, protocol.option_style)) for option in sample.options),
            "subtitles": subtitles,
        }[placeholder]

    return protocol.system, template.fill(value)


def wording_of(protocol: Protocol) -> Callable[[Sample, Sequence[DecodedMedia]], tuple[str, str | Turn]]:
    """``words`` of a protocol as ``PromptBuilder`` takes it: of a sample and its decoded media.

    Subtitles are those of the first video; questions of the bundled sets have one. What is interleaved must have it. It
    can be sent to other processes.

    Raises:
        SampleError: as ``words`` and ``with_media``; ``not_asked`` where frames and texts are to be interleaved and the
            media are not one video, or the question places the video among its words.
    """
    return partial(_words_over_media, protocol)


def _words_over_media(protocol: Protocol, sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, str | Turn]:
    video = next((item for item in media if item.kind == "video"), None)
    cues, seconds = (video.subtitles, video.frame_seconds) if video else ((), ())
    system, text = words(protocol, sample, cues, seconds)
    user = with_media(sample, text)
    if protocol.subtitles != "interleaved":
        return system, user
    if len(media) != 1 or video is None or isinstance(user, Turn):
        came = f"{len(media)} media" if len(media) != 1 or video is None else "'<video>' amid its text"
        raise SampleError(
            "not_asked",
            f"protocol {protocol.name} shows the frames of one video with subtitles between them, and the sample has "
            f"{came}. Leave the question out, or choose another protocol.",
        )
    return system, Turn((*interleaved(cues, seconds), user))


def interleaved(cues: Sequence[Cue], frame_seconds: Sequence[float]) -> list[str | int]:
    """Indices of frames, and subtitles between them, each on a line of its own, by the rule of LongVideoBench.

    A text stands behind the frames up to the middle of its time, that moment included, and only if a frame lies
    strictly inside that time; for this a text of less than a second has half a second on both sides of its middle.
    Source: the loader of longvideobench/LongVideoBench.

    interleaved([Cue(1.0, 3.0, "Mind the gap.")], (0.0, 2.0, 4.0)) == [0, 1, "Mind the gap.\n", 2]
    """
    parts: list[str | int] = []
    shown = 0
    for cue in cues:
        middle = (cue.start + cue.end) / 2
        while shown < len(frame_seconds) and frame_seconds[shown] <= middle:
            parts.append(shown)
            shown += 1
        is_short = cue.end - cue.start < 1
        start, end = (middle - 0.5, middle + 0.5) if is_short else (cue.start, cue.end)
        if any(start < second < end for second in frame_seconds):
            parts.append(f"{cue.text}\n")
    return [*parts, *range(shown, len(frame_seconds))]


def restyled(option: str, style: OptionStyle) -> str:
    """An option "A. text" as ``style`` letters it: restyled("B. a cat", "(A) text") == "(B) a cat"."""
    letter, _, text = option.partition(". ")
    return _LETTERED[style].format(letter, text)


def shown_subtitles(rule: SubtitleRule, sample: Sample, cues: Sequence[Cue], frame_seconds: Sequence[float]) -> str:
    """The texts that a rule takes of a video's subtitles, as they stand in a prompt; "" for none.

    Of a subtitle from ``start`` to ``end`` and a frame at ``t``, all in seconds:

    - ``at_frames``: each with start <= t < end for some frame, once, a line each (Video-MME's README says that only
      those at sampled frames are given, and not which side of an edge counts).
    - ``lmms``: the same (lmms-eval, videomme_doc_to_text_subtitle, compares frame numbers so); "No subtitles available"
      for a video without a file of them.
    - ``kit``: for every frame the first with start < t < end, a line each, so that one text may stand there repeatedly
      (VLMEvalKit, vlmeval/dataset/videomme.py).
    - ``qwen3_vl``: each with start < t < end for some frame, once, joined by blanks (Qwen3-VL, evaluation/VideoMME).
    - ``none``: none; ``interleaved``: none among the words (``interleaved``).
    """
    if rule in ("none", "interleaved"):
        return ""
    if rule == "lmms" and not any(ref.subtitles for ref in sample.media):
        return _NO_FILE
    if rule == "kit":
        firsts = [next((cue.text for cue in cues if cue.start < t < cue.end), "") for t in frame_seconds]
        return "\n".join(text for text in firsts if text)
    if rule == "qwen3_vl":
        return " ".join(cue.text for cue in cues if any(cue.start < t < cue.end for t in frame_seconds))
    return "\n".join(cue.text for cue in cues if any(cue.start <= t < cue.end for t in frame_seconds))


def _detail(protocol: Protocol, sample: Sample, key: str) -> str:
    if key not in sample.details:
        known = ", ".join(sample.details) or "none"
        raise SampleError(
            "lacks_detail",
            f"protocol {protocol.name} writes details.{key} into its prompt, and the sample's details have {known}. "
            f"Prepare the set again with 'vlm-pg prepare {protocol.pipeline or 'NAME'}', or choose another protocol.",
        )
    return detail_text(sample.details[key])
