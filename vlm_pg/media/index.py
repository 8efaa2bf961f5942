"""The frames of a video file, from the timestamps of its packets: when each is shown, where decoding may start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from vlm_pg.media.boundary import DecodeFailure, reading
from vlm_pg.media.coded_pictures import FieldPairs, LateStart, Mpeg4Pictures, ShownOrder
from vlm_pg.media.keyframes import Entry, Syntax, entry, is_looked_into, is_rasl, is_shown, leaves_out, syntax_of


class TooManyFrames(DecodeFailure):
    """More frames are stored than the limit; reading stopped there."""


@dataclass(frozen=True)
class EntryPoint:
    """A picture that decoding may start with. ``dts``: its decoding timestamp; where unknown its pts."""

    pts: int
    dts: int


@dataclass(frozen=True)
class VideoIndex:
    """The frames of a video, from the timestamps of its packets.

    ``pts``: presentation timestamp of every shown frame, ascending, in units of ``time_base`` seconds.
    ``entries``: where decoding may start, ascending by pts; of each, every frame shown from it on comes out right.
    ``key_positions_agree``: whether every flagged key frame is, say, the tenth frame both as stored and as shown, and
    really needs no other frame. A decoder that counts from flagged key frames else returns neighbouring frames.
    ``video_reach``, ``reach``: from when until when the video's packets, and those of all streams, go, in seconds.
    ``flags_are_entries``: whether decoding may start with every flagged key frame, those that are cut away included.
    ``times_hold``: whether a frame that comes with a timestamp is the one shown then. In doubt where a codec that may
    store pictures in another order than they are shown has all in the order of their timestamps: either it stores none
    so, or those are times of storage (AVI, raw streams put into a container unparsed). They do not hold where pictures
    come out in another order than that of their timestamps, and where packets hold several pictures (DivX).
    ``starts_at_entry``: whether decoding may start with the first stored packet.
    ``shown_until``: when the last of the frames has been shown for as long as its packet says, in seconds.
    ``lost_seconds``: how long the pictures at the start last that no decoder shows.
    """

    pts: tuple[int, ...]
    entries: tuple[EntryPoint, ...]
    time_base: Fraction
    key_positions_agree: bool
    video_reach: tuple[float, float]
    reach: tuple[float, float]
    flags_are_entries: bool
    times_hold: bool
    starts_at_entry: bool
    shown_until: float = 0.0
    lost_seconds: float = 0.0

    @property
    def pts_seconds(self) -> list[float]:
        """Presentation time of every frame, ascending."""
        return [float(pts * self.time_base) for pts in self.pts]

    def shares_its_time(self, index: int) -> bool:
        """Whether another frame has the same timestamp."""
        return self.pts[index] in self.pts[max(0, index - 1) : index] + self.pts[index + 1 : index + 2]

    def check_times_name_frames(self, decoder: str) -> None:
        """Refuse a decoder that knows frames by their times alone, where that does not do. Raises DecodeFailure."""
        if not self.times_hold:
            raise DecodeFailure(f"its packets may carry times of storage, which {decoder} takes for real ones")
        if len(set(self.pts)) < len(self.pts):
            raise DecodeFailure(f"it has frames of equal times, which {decoder} does not tell apart")


@dataclass
class _Reach:
    """From when until when the packets of a stream go, in units of its time base."""

    time_base: Fraction | None
    first: int | None = None
    end: int = 0

    def add(self, packet: Any) -> None:
        time = packet.dts if packet.pts is None else packet.pts
        if time is not None:
            end = time + (packet.duration or 0)
            self.end = end if self.first is None else max(self.end, end)
            self.first = time if self.first is None else min(self.first, time)

    def seconds(self) -> tuple[float, float]:
        base = self.time_base or Fraction(0)
        return float((self.first or 0) * base), float(self.end * base)


@dataclass
class _Frames:
    """State gathered from the video's packets, in the order of storage.

    ``flagged``: the key frames, each with its index in ``pts`` and what it really is. ``cut``: entry points among the
    frames that an edit list cuts away, and ``flags_hold`` while these are all that is flagged there. ``all_intra``: the
    codec has no other frames than key frames. ``may_reorder``: it may show pictures in another order than they are
    stored in, and ``in_order`` while none is. ``start``: the first packet, if it is an entry point, and ``first`` what
    it holds while pictures follow that are shown before it. ``restart``: where the clock went back at an entry point,
    before which all that is stored is shown: from when to when. ``until``: when the last of them has been shown, and
    ``ends`` the one stored last. ``lost_from``: time of the first picture that no decoder shows; None: none is lost.
    """

    syntax: Syntax
    extradata: bytes = b""
    all_intra: bool = False
    may_reorder: bool = False
    pts: list[int] = field(default_factory=list)
    flagged: list[tuple[int, Entry]] = field(default_factory=list)
    entries: list[EntryPoint] = field(default_factory=list)
    cut: list[EntryPoint] = field(default_factory=list)
    flags_hold: bool = True
    in_order: bool = True
    start: EntryPoint | None = None
    first: tuple[bytes, Entry] | None = None
    latest: int | None = None
    restart: tuple[int, int] | None = None
    until: int | None = None
    ends: int | None = None
    lost_from: int | None = None
    order: ShownOrder = field(init=False)
    late: LateStart = field(init=False)
    fields: FieldPairs = field(init=False)
    mpeg4: Mpeg4Pictures = field(init=False)

    def __post_init__(self) -> None:
        self.order, self.late = ShownOrder(self.syntax), LateStart(self.syntax)
        self.fields = FieldPairs(self.syntax, self.extradata)
        self.mpeg4 = Mpeg4Pictures(self.syntax, self.extradata)

    def add(self, packet: Any) -> None:
        coded = memoryview(packet)
        self.late.follow(packet, coded)
        if not is_shown(bytes(coded[:1]), self.syntax):
            return
        # a second field, or the picture before it stays on display
        if self.fields.is_second(coded, packet.is_keyframe) or not self.mpeg4.is_frame(coded):
            self._lengthen(packet)
            return
        if self.fields.is_alone and self.entries:
            raise DecodeFailure("a picture is stored as two fields, of which one is missing")
        if packet.pts is None:
            if packet.is_discard or (self.first and is_rasl(bytes(coded), self.syntax)):
                return
            raise DecodeFailure("a frame has no presentation timestamp")
        looked_at = bytes(coded) if packet.is_keyframe and is_looked_into(self.syntax) else bytes(coded[:1])
        kind = entry(looked_at, packet.is_keyframe, self.syntax)
        if kind is not Entry.NONE:
            point = EntryPoint(packet.pts, packet.pts if packet.dts is None else packet.dts)
            is_later = self.latest is not None and self.latest < packet.pts
            if self.late.begins and not self.entries and not self.cut and is_later:  # the stream begins here
                self.lost_from = min(self.pts, default=None)
                self.pts, self.flagged, self.latest, self.until, self.in_order = [], [], None, None, True
                self.order = ShownOrder(self.syntax)
            if not self.pts and not self.cut:
                self.start, self.first = point, (bytes(coded), kind)
            (self.cut if packet.is_discard else self.entries).append(point)
        if packet.is_discard:
            self.flags_hold &= kind is not Entry.NONE or not packet.is_keyframe
            return
        self._follow_clock(packet.pts, kind)
        if self.first and self._is_left_out(packet.pts, coded):
            return
        if packet.is_keyframe:
            self.flagged.append((len(self.pts), kind))
        self.pts.append(packet.pts)
        self.order.add(coded, packet.pts)
        self._lengthen(packet)

    def _lengthen(self, packet: Any) -> None:
        """By the packet's duration; a second field may have no time of its own."""
        start = self.ends if packet.pts is None else packet.pts
        if start is not None and not packet.is_discard:
            self.ends = start + (packet.duration or 0)
            self.until = self.ends if self.until is None else max(self.until, self.ends)

    def _is_left_out(self, pts: int, coded: memoryview) -> bool:
        """Of the pictures directly behind the first packet."""
        assert self.start is not None and self.first is not None
        if pts > self.start.pts or (self.pts and self.order.is_reference(coded)):
            self.first = None
            return False
        return pts < self.start.pts and leaves_out(*self.first, bytes(coded), self.syntax)

    def _begin_at(self, first: int) -> None:
        remaining = [index for index, pts in enumerate(self.pts) if pts >= first]
        new_index = {index: new for new, index in enumerate(remaining)}
        self.pts = [self.pts[index] for index in remaining]
        self.flagged = [(new_index[index], kind) for index, kind in self.flagged if index in new_index]
        self.entries = [point for point in self.entries if point.pts >= first]

    def _follow_clock(self, pts: int, kind: Entry) -> None:
        if self.latest is None or pts > self.latest:
            self.latest = pts
        elif pts < self.latest:
            self.in_order = False
            if kind is not Entry.NONE and self.restart is None:
                self.restart = self.latest, pts

    def index(self, time_base: Fraction, video_reach: tuple[float, float], reach: tuple[float, float]) -> VideoIndex:
        """Raises DecodeFailure when there is no frame, or more than one clock."""
        if self.late.first is not None:
            self.lost_from = min(self.pts, default=None)
            self._begin_at(self.late.first)
        if not self.pts:
            raise DecodeFailure("the video stream has no frames")
        self._doubt_flags()
        self.order.end()
        if self.restart is not None:
            before, after = (float(pts * time_base) for pts in self.restart)
            raise DecodeFailure(
                f"its clock goes back from {before:.3f} s to {after:.3f} s, as where files are joined byte by byte, so "
                "times do not tell its frames apart. Remux it with times that go on"
            )
        shown = sorted(self.pts)
        shared = {pts for pts, after in pairwise(shown) if pts == after}
        entries = self.entries + [point for point in self.cut if point.pts < shown[0]]
        # the index of an entry point that shares its time is not known, but for the first
        entries = [
            point
            for point in entries
            if (point.pts not in shared or point is self.start)
            and (self.in_order or self.order.can_count_from(point.pts, shown))
        ]
        return VideoIndex(
            pts=tuple(shown),
            entries=tuple(sorted(entries, key=lambda point: point.pts)),
            time_base=time_base,
            key_positions_agree=all(
                kind is Entry.CLEAN and shown[index] == self.pts[index] for index, kind in self.flagged
            ),
            video_reach=video_reach,
            reach=reach,
            flags_are_entries=self.flags_hold and all(kind is not Entry.NONE for _, kind in self.flagged),
            times_hold=self.order.ascends and not self.mpeg4.is_packed and not (self.may_reorder and self.in_order),
            starts_at_entry=self.start is not None,
            shown_until=float((self.until or 0) * time_base),
            lost_seconds=0.0 if self.lost_from is None else max(0.0, float((shown[0] - self.lost_from) * time_base)),
        )

    def _doubt_flags(self) -> None:
        """Where every frame is flagged as a key frame (an MP4 without a sync table), flags say nothing."""
        if self.all_intra or is_looked_into(self.syntax) or not 1 < len(self.pts) == len(self.flagged):
            return
        self.cut, self.entries = (self.cut[:1], []) if self.cut else ([], self.entries[:1])
        self.restart = None  # what is stored before one of these may be shown after it
        self.flagged = [(index, Entry.CLEAN if index == 0 else Entry.NONE) for index, _ in self.flagged]


def index_of(container: Any, stream: Any, max_frames: int | None = None) -> VideoIndex:
    """Read through an open video without decoding.

    Raises:
        DecodeFailure: there is no usable frame.
        TooManyFrames: there are more than ``max_frames``.
    """
    import av

    with reading((av.FFmpegError,)):
        coded = stream.codec_context
        syntax = syntax_of(coded.codec.canonical_name, coded.extradata)
        frames = _Frames(syntax, coded.extradata or b"", coded.codec.intra_only, coded.has_b_frames)
        reaches: dict[int, _Reach] = {}
        for packet in packets(container):
            if packet.size == 0:  # end marker
                continue
            number = packet.stream.index
            if number not in reaches:
                reaches[number] = _Reach(packet.time_base)
            reaches[number].add(packet)
            if number == stream.index:
                frames.add(packet)
                if max_frames is not None and len(frames.pts) > max_frames:
                    raise TooManyFrames(f"it has more than {max_frames} frames")
        seconds = {number: reach.seconds() for number, reach in reaches.items()}
        starts, ends = zip(*seconds.values()) if seconds else ((0.0,), (0.0,))
        return frames.index(stream.time_base, seconds.get(stream.index, (0.0, 0.0)), (min(starts), max(ends)))


def packets(container: Any, *streams: Any) -> Iterator[Any]:
    """The packets of ``streams`` (default: all) as stored, and an empty one of each at the end.

    A stream that is announced late, as MPEG-TS allows, is not read; PyAV has no position for its end marker.
    """
    demuxer = container.demux(*streams)
    while True:
        try:
            yield next(demuxer)
        except (StopIteration, IndexError):
            return
