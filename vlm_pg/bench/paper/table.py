"""The table of what was counted, in Markdown, which a terminal shows as well."""

from __future__ import annotations

from typing import Any

from vlm_pg.bench.paper.plan import OURS
from vlm_pg.memory import GIB

_NOTES = """\
Counted, not measured: no device ran any of this. A time's first number is a roofline, a lower bound: of each kind of
operation the larger of FLOPs by the device's peak and bytes by its bandwidth, summed over kinds, or what the host takes
to launch the kernels ({launch:g} us each, an assumption) if that is more; which of the three binds stands behind it.
The second ("~") is what to expect: the same sum with the shares of the peaks that an H100 reached, and a time for each
kernel, wait and launch (bench/paper/devices.py); of "x ours" both are these. Bytes are those of kernels that
read and write each operand once. Peak memory is above the weights, gradients included, without optimizer states; "no"
behind a time: weights and peak do not fit into the device. A peak with ">=" follows from shallower models and is a
least. Waits are how often the host asks for a value.
"""
_REFERENCE = """\
Linear attention is counted as torch's reference operators, chunk by chunk. Where flash-linear-attention is installed, a
GPU runs its Triton kernels instead, which are not counted: far fewer launches and bytes. In decoding ours runs a Triton
kernel of its own on a GPU.
"""
_RANKS = """\
Of sequence ranks one is counted, the one with the most rows. Each has all weights and gradients; summing gradients over
ranks at an update's end is not in here. Sent are bytes to the other ranks. The link is a fourth roof, one way, while
nothing else runs:
{links}.
"""
_HEAD = ("", "TFLOP", "GB", "of it element-wise", "launches", "waits", "peak GiB")


def markdown(record: dict[str, Any]) -> str:
    """Notes, then a table for each model, kind of work and point; what was not counted with its reason."""
    devices, settings = list(record["devices"]), record["settings"]
    words = [_NOTES.format(launch=settings["launch_seconds"] * 1e6)]
    if "links" in record:
        links = record["links"].items()
        said = [f"{link['name']} ({name}: {link['bytes_per_second'] / 1e9:g} GB/s)" for name, link in links]
        words.append(_RANKS.format(links=", ".join(said)))
    words.append(_settings_line(settings))
    places: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in record["entries"]:
        places.setdefault((entry["model"], entry["work"], point_words(entry)), []).append(entry)
    reasons: dict[str, list[str]] = {}
    for (model, work, point), entries in places.items():
        weights = next((e["weights_bytes"] for e in entries if "weights_bytes" in e), None)
        size = "" if weights is None else f" (weights {weights / GIB:.1f} GiB)"
        words.append(f"\n### {model}{size}, {work}: {point}\n")
        if any(entry.get("linear_attention") == "reference" for entry in entries):
            words.append(_REFERENCE)
        sends = any("sequence_ranks" in entry for entry in entries)
        head = (*_HEAD, *(["sent GB"] if sends else []), *devices)
        words += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        whole = (e for e in entries if "counts" in e and "sequence_ranks" not in e)
        ours = next((e for e in whole if e["contestant"] == OURS[work]), None)
        for entry in entries:
            if "not_counted" in entry:
                reasons.setdefault(entry["not_counted"], []).append(f"{row_name(entry)} ({model}, {work}: {point})")
            else:
                words += _rows(entry, ours, devices, sends)
    if reasons:
        words.append("\nNot counted:\n")
        words += [f"- {'; '.join(of)}: {why}" for why, of in reasons.items()]
    return "\n".join(words) + "\n"


def point_words(entry: dict[str, Any]) -> str:
    """Of one entry: P, G and lengths."""
    point, work = entry["point"], entry["work"]
    if work == "tower":
        return f"{point['visual_tokens']:,} visual tokens"
    if work == "grpo-step":
        size = f"{point['frames']:,} frames, prompt of {point['prefix']:,}"
        return f"{size}, G={point['generations']}, {point['new_tokens']:,} tokens"
    last = point["response"] if work == "step" else point["new_tokens"]
    groups = f" x {point['groups']} groups" if point.get("groups", 1) > 1 else ""
    return f"prefix {point['prefix']:,}, G={point['generations']}, {last:,} tokens{groups}"


def _settings_line(settings: dict[str, Any]) -> str:
    said = [settings["dtype"], *(name for name in ("checkpointing", "liger") if settings[name])]
    if settings["lora"]:
        said.append(f"LoRA of rank {settings['lora']}")
    return f"Settings: {', '.join(said)}."


def row_name(entry: dict[str, Any]) -> str:
    """The contestant, and of how many ranks it is one."""
    ranks = entry.get("sequence_ranks")
    return entry["contestant"] + (f", one of {ranks} sequence ranks" if ranks else "")


def _rows(entry: dict[str, Any], ours: dict[str, Any] | None, devices: list[str], sends: bool) -> list[str]:
    counts, least = entry["counts"], ">=" if entry.get("layers_counted") and entry["work"] != "rollout" else ""
    cells = _counted(row_name(entry), counts) + [f"{least}{entry['peak_bytes'] / GIB:.2f}"]
    if sends:
        cells.append(f"{sum(counts.get('sent', {}).values()) / 1e9:,.2f}")
    for name in devices:
        roof = entry["roofline"][name]
        times = ""
        if ours is not None and entry is not ours:
            of = "one rank" if "sequence_ranks" in entry else "ours"
            times = f", {roof['expected_seconds'] / ours['roofline'][name]['expected_seconds']:.2f}x {of}"
        cells.append(f"{_time(roof)}{times}{'' if roof['fits'] else ', no'}")
    rows = [_line(cells)]
    for phase, found in entry.get("phases", {}).items():
        of_phase = _times(found["roofline"], devices)
        held = f"{least if phase == 'update' else ''}{found['peak_bytes'] / GIB:.2f}"
        rows.append(_line([*_counted(f"  {phase}", found["counts"]), held, *of_phase]))
    if middle := entry.get("middle"):
        of_step = _times(entry["middle_roofline"], devices)
        rows.append(_line([*_counted("  one step, halfway", middle), "", *of_step]))
    return rows


def _times(rooflines: dict[str, Any], devices: list[str]) -> list[str]:
    return [_time(rooflines[name]) for name in devices]


def _time(roof: dict[str, Any]) -> str:
    return f"{seconds_words(roof['seconds'])} {roof['roof']}, ~{seconds_words(roof['expected_seconds'])}"


def _counted(name: str, counts: dict[str, Any]) -> list[str]:
    flops, moved = sum(counts["flops"].values()), sum(counts["bytes"].values())
    waits = sum(counts["waits"].values())
    bulk = [f"{flops / 1e12:,.1f}" if flops >= 1e12 else f"{flops / 1e12:.3f}", f"{moved / 1e9:,.1f}"]
    return [name, *bulk, f"{counts['bytes']['elementwise'] / 1e9:,.1f}", f"{counts['launches']:,.0f}", f"{waits:,.0f}"]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def seconds_words(seconds: float) -> str:
    """Three digits, in ms below a second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
