"""The least time that counted work can take on a device, its roofline, and the time to expect.

Williams, Waterman, Patterson: Roofline (CACM 2009). Of each kind of operation the slower of computing and moving memory
counts, and kinds follow one another; a third roof is the host, which launches one kernel after the other. No kernel
reaches a device's peaks, so this is a lower bound. ``expected_seconds`` is the same sum with the shares of the peaks
that were reached where it was measured.
"""

from __future__ import annotations

from typing import Any

from vlm_pg.bench.paper.devices import REACHED, Device, Link

# What launching one kernel from eager torch costs the host: an assumption that --launch-us replaces.
LAUNCH_SECONDS = 5e-6
ROOFS = ("FLOPs", "bytes", "launches", "link")
# A kind of its own beside ``KINDS``, of ranks that send each other something.
WIRE = "wire"


def roofline(
    counts: dict[str, Any], host_launches: float, device: Device, dtype: str, launch: float, link: Link | None = None
) -> dict[str, Any]:
    """Seconds by kind with the roof that binds each, their sum, the host's seconds, and which roof binds the whole.

    Args:
        counts: with ``flops`` and ``bytes`` by kind.
        host_launches: how often the host launches something; a CUDA graph counts once.
        launch: seconds of one.
        link: to the other ranks, for ``counts`` with ``sent``; nothing else runs meanwhile.

    Returns:
        ``device_seconds`` sums over kinds, ``seconds`` is the larger of it and ``launch_seconds``; ``roof`` is
        "launches" if the host takes longer, else the one of the others under which the device spends more of its time.
    """
    kinds, under = {}, {"FLOPs": 0.0, "bytes": 0.0}
    for kind, amount in counts["bytes"].items():
        computing = counts["flops"].get(kind, 0) / device.flops_per_second[dtype]
        moving = amount / device.bytes_per_second
        roof = "FLOPs" if computing > moving else "bytes"
        kinds[kind] = {"seconds": max(computing, moving), "roof": roof}
        under[roof] += max(computing, moving)
    if link is not None and "sent" in counts:
        under["link"] = sum(counts["sent"].values()) / link.bytes_per_second
        kinds[WIRE] = {"seconds": under["link"], "roof": "link"}
    on_device, on_host = sum(under.values()), host_launches * launch
    roof = "launches" if on_host > on_device else max(under, key=lambda name: under[name])
    return {
        "seconds": max(on_device, on_host),
        "device_seconds": on_device,
        "launch_seconds": on_host,
        "roof": roof,
        "kinds": kinds,
    }


def expected_seconds(
    counts: dict[str, Any], host_launches: float, device: Device, dtype: str, link: Link | None = None
) -> float:
    """Seconds that counted work will take, by the shares of a device's peaks in ``REACHED``.

    Kinds follow one another, with ``kernel_seconds`` for each launch and ``wait_seconds`` for each wait; or the host's
    launches, if they take longer.

    Args:
        counts: as ``roofline``, with ``launches`` and ``waits`` too.
    """
    seconds = counts["launches"] * REACHED.kernel_seconds + sum(counts["waits"].values()) * REACHED.wait_seconds
    for kind, amount in counts["bytes"].items():
        of_bytes = REACHED.weights_bandwidth if kind == "matmul" else REACHED.bandwidth
        of_flops = REACHED.matmul if kind == "matmul" else REACHED.attention
        computing = counts["flops"].get(kind, 0) / (of_flops * device.flops_per_second[dtype])
        seconds += max(computing, amount / (of_bytes * device.bytes_per_second))
    if link is not None:
        seconds += sum(counts.get("sent", {}).values()) / link.bytes_per_second
    return max(seconds, host_launches * REACHED.launch_seconds)


def fits(weights_bytes: float, peak_bytes: float, device: Device) -> bool:
    """Whether weights and what is above them fit; without optimizer states and without what a driver keeps."""
    return weights_bytes + peak_bytes <= device.memory_bytes
