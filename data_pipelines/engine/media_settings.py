"""Under which settings a pipeline looks at media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from vlm_pg.config_files import nearest_keys
from vlm_pg.errors import ConfigError, printable
from vlm_pg.media.settings import MediaSettings

# Where no settings are given: limits that a run may raise refuse nothing, what no run can read is the file's fault.
_LENIENT = {"max_video_seconds": 1e9, "max_header_pixels": 170_000_000, "deadline_seconds": 600.0}
# Of this process, not of the media.
_NOT_OF_MEDIA = {"workers"}


def media_settings(given: Sequence[str], workers: int) -> MediaSettings:
    """The settings, as ``--media KEY=VALUE ...`` gives them; all others then have a run's defaults.

    Raises:
        ConfigError: a key or value is none.
    """
    if not given:
        return MediaSettings(**_LENIENT, workers=workers)
    values: dict[str, Any] = {}
    for one in given:
        key, equals, text = one.partition("=")
        key = key.strip().removeprefix("media.")
        if not equals or key not in MediaSettings.model_fields or key in _NOT_OF_MEDIA:
            near = nearest_keys(key, MediaSettings)
            raise ConfigError(
                f"--media has '{printable(one, 200)}'. KEY=VALUE is expected, where KEY is one of a run's 'media' "
                f"settings but workers, for example max_frames=64.{f' Did you mean {near[0]}?' if near else ''}"
            )
        values[key] = _value(text)
    try:
        return MediaSettings(**values, workers=workers)
    except ValidationError as error:
        said = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'media'} is {printable(str(one['input']), 100)}: {one['msg']}"
            for one in error.errors()
        )
        raise ConfigError(f"--media cannot be used: {said}. Correct it.") from None


def _value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def shown_settings(settings: MediaSettings, factor: int) -> str:
    """What of settings and patches decides about numbers of visual tokens, for people."""
    sampled = "evenly" if settings.num_frames else f"{settings.fps:g} a second"
    frames = f"frames {sampled}, at most {settings.most_frames} of up to {settings.max_pixels:,} pixels"
    budget = "" if settings.video_tokens is None else f", {settings.video_tokens:,} tokens of a video"
    return f"{frames}, images of up to {settings.image_max_pixels:,}{budget}, patches of {factor}"
