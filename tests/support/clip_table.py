"""The clips that frame accuracy is measured on: every way to store a video that a codec and container allow."""

from __future__ import annotations

from dataclasses import replace

from tests.support.clips import CUT, Clip

X265_QUIET = "log-level=none:pools=none:frame-threads=1"
QUICK = {
    "libx264": {"preset": "veryfast", "g": "12", "bf": "0", "threads": "1"},
    "libx265": {"preset": "ultrafast", "g": "12", "x265-params": f"{X265_QUIET}:keyint=12:bframes=0:open-gop=0"},
    "libvpx": {"g": "12", "cpu-used": "8", "deadline": "realtime", "b": "400k"},
    "libvpx-vp9": {"g": "12", "cpu-used": "8", "deadline": "realtime", "b": "400k"},
    "libsvtav1": {"g": "12", "preset": "8", "crf": "10", "svtav1-params": "lp=1"},
    "mpeg4": {"g": "12", "b": "800k"},
    "mpeg2video": {"g": "12", "b": "800k"},
    "mpeg1video": {"g": "12", "b": "800k"},
    "flv": {"g": "12", "b": "800k"},
    "wmv2": {"g": "12", "b": "800k"},
    "msmpeg4v2": {"g": "12", "b": "800k"},
    "prores_ks": {},
    "mjpeg": {"b": "2000k"},
    "ffv1": {},
}
PAIRS = {
    "mp4": ("libx264", "libx265", "libvpx-vp9", "libsvtav1", "mpeg4", "mpeg2video", "mjpeg"),
    "mov": ("libx264", "libx265", "mpeg4", "prores_ks", "mjpeg"),
    "matroska": ("libx264", "libx265", "libvpx", "libvpx-vp9", "libsvtav1", "mpeg4", "mpeg2video", "ffv1"),
    "webm": ("libvpx", "libvpx-vp9", "libsvtav1"),
    "mpegts": ("libx264", "libx265", "mpeg2video", "mpeg4"),
    "vob": ("mpeg2video", "mpeg1video", "libx264"),
    "avi": ("mpeg4", "mjpeg", "msmpeg4v2", "libx264"),
    "flv": ("flv", "libx264"),
    "asf": ("wmv2", "msmpeg4v2"),
}
FORMATS = {"prores_ks": "yuv422p10le", "mjpeg": "yuvj420p"}
FIXED_RATE = ("avi", "vob")  # containers (and below: codecs) that know no variable rate
FIXED_CODECS = ("mpeg2video", "mpeg1video", "wmv2", "msmpeg4v2", "flv")
X264_B = {**QUICK["libx264"], "bf": "3", "x264-params": "b-pyramid=normal:b-adapt=0"}


def _x265(extra: str) -> dict[str, str]:
    return {**QUICK["libx265"], "x265-params": f"{X265_QUIET}:keyint=12:{extra}"}


FEATURES: dict[str, dict[str, dict[str, str]]] = {
    "b-frames": {
        "libx264": X264_B,
        "libx265": _x265("bframes=3:b-adapt=0:open-gop=0"),
        "mpeg4": {**QUICK["mpeg4"], "bf": "2"},
        "mpeg2video": {**QUICK["mpeg2video"], "bf": "2", "flags": "+cgop", "sc_threshold": "1000000000"},
    },
    "open-gop": {
        "libx264": {**X264_B, "x264-params": "b-adapt=0:open-gop=1:keyint=12:scenecut=0"},
        "libx265": _x265("bframes=3:b-adapt=0:open-gop=1:scenecut=0"),
        "mpeg2video": {**QUICK["mpeg2video"], "bf": "2"},
    },
    "intra-refresh": {
        "libx264": {**QUICK["libx264"], "x264-params": "intra-refresh=1:keyint=16"},
        "libx265": _x265("intra-refresh=1:bframes=0"),
    },
}


def table() -> list[Clip]:
    """All clips, each with a name of its own."""
    plain = [
        Clip(codec, container, "plain", QUICK[codec], pix_fmt=FORMATS.get(codec, "yuv420p"))
        for container, codecs in PAIRS.items()
        for codec in codecs
    ]
    clips = list(plain)
    for clip in plain:
        if clip.container not in FIXED_RATE and clip.codec not in FIXED_CODECS:
            clips.append(replace(clip, feature="variable", variable=True))
        if clip.container != "avi":
            clips.append(replace(clip, feature="offset", start=100))
        for feature, options in FEATURES.items():
            if clip.codec in options and clip.container != "flv" and (clip.codec, clip.container) != ("libx264", "avi"):
                clips.append(replace(clip, feature=feature, options=options[clip.codec]))
    return clips + _rotated() + _deep() + _without_index() + _edited()


def _rotated() -> list[Clip]:
    return [
        Clip(codec, container, f"turned-{turn}", QUICK[codec], turn=turn)
        for container in ("mp4", "mov", "matroska")
        for codec in ("libx264", "libx265")
        for turn in (90, 180, 270)
    ]


def _deep() -> list[Clip]:
    depths = {
        "libx264": ("yuv420p10le", "yuv422p10le", "yuv444p10le"),
        "libx265": ("yuv420p10le", "yuv420p12le"),
        "libsvtav1": ("yuv420p10le",),
        "ffv1": ("yuv420p10le", "yuv420p12le"),
    }
    return [
        Clip(codec, container, pix_fmt, QUICK[codec], pix_fmt=pix_fmt)
        for codec, formats in depths.items()
        for pix_fmt in formats
        for container in ("mp4", "matroska")
        if (codec, container) != ("ffv1", "mp4")
    ]


def _without_index() -> list[Clip]:
    pieces = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    return [
        *(Clip("libx264", kind, "no-stss", QUICK["libx264"], patch="no-stss") for kind in ("mp4", "mov")),
        Clip("libx264", "mp4", "no-stss-b-frames", X264_B, patch="no-stss"),
        Clip("libx265", "mp4", "no-stss", QUICK["libx265"], patch="no-stss"),
        *(
            Clip(codec, "mp4", "no-stss", QUICK[codec], patch="no-stss")
            for codec in ("mpeg4", "mpeg2video", "libvpx-vp9", "libsvtav1")
        ),
        Clip("libx264", "mp4", "fragments", QUICK["libx264"], muxer=pieces),
        Clip("libx264", "mp4", "fragments-b-frames", X264_B, muxer=pieces),
        Clip("libx265", "mp4", "fragments", QUICK["libx265"], muxer=pieces),
        *(
            Clip(codec, "matroska", "no-cues", QUICK[codec], patch="no-cues")
            for codec in ("libx264", "libx265", "libvpx-vp9", "mpeg4")
        ),
    ]


def _edited() -> list[Clip]:
    edit = {"patch": "edit-list", "first": CUT}
    return [
        *(
            Clip(codec, "mp4", "edit-list", QUICK[codec], muxer={"use_editlist": "1"}, **edit)  # type: ignore[arg-type]
            for codec in ("libx264", "libx265", "mpeg4")
        ),
        Clip("libx264", "mov", "edit-list-b-frames", X264_B, **edit),  # type: ignore[arg-type]
        Clip("libx264", "mp4", "edit-list-b-frames", X264_B, **edit),  # type: ignore[arg-type]
    ]
