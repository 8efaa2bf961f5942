"""Files that are no videos but tell a careless decoder to open something else: scripts, play lists, descriptions."""

from __future__ import annotations

from collections.abc import Iterator

EXTENSIONS = (".mp4", ".mkv", ".mov", ".webm")


def scripts(targets: list[str], url: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of files that name one of ``targets`` (paths of files that must stay closed) or ``url``.

    Every kind of script comes plain and behind bytes that make it look like a container at first sight, under the
    extensions that records may name.
    """
    number = 0
    for kind, content in _contents(targets, url):
        for disguise, prefix in _DISGUISES.items():
            extension = EXTENSIONS[number % len(EXTENSIONS)]
            number += 1
            yield f"{kind}-{disguise}-{number}{extension}", prefix + content


_DISGUISES = {
    "plain": b"",
    "bom": b"\xef\xbb\xbf",
    "blank": b"\n",
    "ftyp": b"\0\0\0\x14ftypisom\0\0\0\0mp42",
    "word": b"aaaaftypisom\n",
    "ebml": b"\x1a\x45\xdf\xa3\n",
    "sync": b"G" + b"\n" * 187 + b"G" + b"\n" * 187 + b"G" + b"\n" * 187,
}


def _contents(targets: list[str], url: str) -> Iterator[tuple[str, bytes]]:
    for position, target in enumerate([*targets, url]):
        yield f"concat{position}", f"ffconcat version 1.0\nfile '{target}'\n".encode()
        yield f"concat-stream{position}", f"ffconcat version 1.0\nstream\nfile {target}\nduration 1\n".encode()
        yield f"hls{position}", f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n".encode()
        yield f"map{position}", f'#EXTM3U\n#EXT-X-MAP:URI="{target}"\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n'.encode()
        yield f"dash{position}", _DASH.replace("TARGET", target).encode()
        yield f"smil{position}", f'<smil><body><video src="{target}"/></body></smil>'.encode()
    yield "long", b"ffconcat version 1.0\n" + f"file {targets[0]}\n".encode() * 20_000
    yield "sdp", b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n"
    yield "asx", f'<asx><entry><ref href="{url}"/></entry></asx>'.encode()
    yield "rtsp", f"RTSPtext\n{url.replace('http', 'rtsp')}\n".encode()
    yield "svg", f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{targets[0]}"/></svg>'.encode()
    yield "lavfi", f"movie={targets[0]}".encode()


_DASH = """<?xml version="1.0"?><MPD type="static" mediaPresentationDuration="PT1S"><Period><AdaptationSet
 mimeType="video/mp4"><Representation id="1" bandwidth="1"><BaseURL>TARGET</BaseURL></Representation></AdaptationSet>
</Period></MPD>"""
