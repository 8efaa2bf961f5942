"""Archives: media unpacked beside them, whole; hostile ones refused with nothing written, inside the folder or out."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipelines import gsm8k
from data_pipelines.engine import archives
from data_pipelines.engine.archives import Limits, archives_below, unpack, unsupported_below, unsupported_message
from vlm_pg.errors import ConfigError

SMALL = Limits(files=50, ratio=4.0, small_bytes=1 << 20, free_bytes=0)
FILES = {"clips/a.mp4": b"film a", "clips/b/c.mp4": b"film c" * 1000, "read me.txt": b"", "übung/ж.jpg": b"x"}


def tar(path: Path, *entries: tuple[str, bytes] | tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as file:  # type: ignore[call-overload]
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                file.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            info.size = len(entry[1])
            file.addfile(info, io.BytesIO(entry[1]))
    return path


def zipped(path: Path, *entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in entries:
            file.writestr(name, content)
    return path


def special(name: str, kind: bytes, linkname: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, linkname
    return info


def zip_link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize("suffix", archives.SUFFIXES)
def test_media_come_out_beside_their_archive(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"videos{suffix}"
    if suffix == ".zip":
        zipped(path, ("clips/", b""), *FILES.items())
    else:
        mode = {".tar": "w", ".tar.bz2": "w:bz2"}.get(suffix, "w:gz")
        tar(path, special("./", tarfile.DIRTYPE), special("clips", tarfile.DIRTYPE), *FILES.items(), mode=mode)
    assert archives_below(tmp_path) == [path]
    assert unpack(path, SMALL) == 4
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES
    assert unpack(path, SMALL) == 0, "it was done before"
    assert not list(tmp_path.glob(".*unpacking"))


@pytest.mark.parametrize("lost", ["gone", "cut"])
def test_what_was_lost_since_comes_out_again(tmp_path: Path, lost: str) -> None:
    path = tar(tmp_path / "v.tar", *FILES.items(), mode="w")
    assert unpack(path, SMALL) == 4
    clip = tmp_path / "clips/b/c.mp4"
    clip.unlink()
    if lost == "gone":
        assert unpack(path, SMALL) == 4
        assert clip.read_bytes() == FILES["clips/b/c.mp4"]
    else:
        clip.write_bytes(b"film")
        with pytest.raises(ConfigError, match=r"'clips/b/c\.mp4' is there already, with another content"):
            unpack(path, SMALL)


def test_a_changed_archive_is_unpacked_and_a_note_of_another_form_is_none(tmp_path: Path) -> None:
    path = tar(tmp_path / "v.tar", *FILES.items(), mode="w")
    assert unpack(path, SMALL) == 4
    tar(path, *FILES.items(), ("new.mp4", b"new"), mode="w")
    assert unpack(path, SMALL) == 5
    (tmp_path / ".v.tar.unpacked").write_text(f"{path.stat().st_size} {path.stat().st_mtime_ns}\n5 files\n")
    assert unpack(path, SMALL) == 5


OTHERS = [
    "x.tar.xz", "x.txz", "x.tar.zst", "x.tzst", "x.tar.lz4", "x.7z", "x.rar", "x.r00", "x.z01", "X.TAR.XZ", "rows.gz",
    "x.zip.001", "x.7z.001", "x.tar.gz.00", "x.tar.part_aa", "x.tar.gz.aa", "x.tar.gzab", "x.tar.part0",
    "x.tgz.part-1", "part_aa", "x_part_ab", "x.part01", "a/b/videos.part03",
]  # fmt: skip
FURTHER = [
    "x.tar", "x.TAR.GZ", "x.zip", "x.tgz", "x.tar.bz2", "x.tar.md", "notes.py", "x.mp4", "part.json", "x.part.mp4",
    "participants", "apart_of_it",
]  # fmt: skip


def test_other_archives_and_parts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*OTHERS, *FURTHER):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in unsupported_below(tmp_path)} == set(OTHERS)
    message = unsupported_message([Path("a.7z"), Path("b.part_aa")])
    assert (
        message.startswith("Not unpacked: a.7z, b.part_aa. Unpacked are .tar, ")
        and "by hand" in message
        and "cat" in message
    )
    for path in tmp_path.iterdir():
        if path.is_file() and path.name != "x.7z":
            path.unlink()
    with pytest.raises(ConfigError, match="holds no annotation files"):
        gsm8k.main([str(tmp_path), "--unpack", "--out", str(tmp_path / "out")])
    assert "x.7z" in capsys.readouterr().out


def test_existing_files_are_never_replaced(tmp_path: Path) -> None:
    path = tar(tmp_path / "v.tar.gz", *FILES.items())
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips/a.mp4").write_bytes(b"film a")
    assert unpack(path, SMALL) == 4
    other = tar(tmp_path / "w.tar.gz", ("clips/new.mp4", b"new"), ("clips/a.mp4", b"FILM A"))
    with pytest.raises(ConfigError, match=r"'clips/a\.mp4' is there already, with another content"):
        unpack(other, SMALL)
    assert (tmp_path / "clips/a.mp4").read_bytes() == b"film a" and not (tmp_path / "clips/new.mp4").exists()


def test_a_killed_one_is_unpacked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar(tmp_path / "v.tar.gz", *FILES.items())
    monkeypatch.setattr(archives, "_move", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        unpack(path, SMALL)
    monkeypatch.undo()
    (tmp_path / ".v.tar.gz.unpacking").mkdir()
    (tmp_path / ".v.tar.gz.unpacking/half.mp4").write_bytes(b"ha")
    assert unpack(path, SMALL) == 4 and not (tmp_path / "half.mp4").exists()


def gzip_bomb(path: Path) -> Path:
    return tar(path, ("a.mp4", b"\0" * (8 << 20)))


def lying_gzip(path: Path) -> Path:
    """A header that states less than there is would have the rest read as further headers."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as file:
        info = tarfile.TarInfo("a.mp4")
        info.size = 1 << 40
        file.addfile(info)
    path.write_bytes(gzip.compress(whole.getvalue()))
    return path


def long_header(path: Path) -> Path:
    """A pax header of 64 MiB, of which a reader would make one string."""
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as file:
        info = tarfile.TarInfo("a.mp4")
        info.pax_headers = {"comment": "x" * (64 << 20)}
        file.addfile(info)
    return path


def lying_zip(path: Path) -> Path:
    """The directory states 10 bytes; 5 MB come out."""
    zipped(path, ("a.mp4", b"\0" * 5_000_000))
    content = bytearray(path.read_bytes())
    offset = content.rindex(b"PK\x01\x02")
    struct.pack_into("<I", content, offset + 24, 10)
    path.write_bytes(content)
    return path


def overlapping_zip(path: Path) -> Path:
    """Two entries of the directory that are one file: how small archives become huge ones."""
    zipped(path, ("a.mp4", b"a" * 1000), ("b.mp4", b"b" * 1000))
    content = bytearray(path.read_bytes())
    offset = content.rindex(b"PK\x01\x02")
    struct.pack_into("<I", content, offset + 42, 0)
    path.write_bytes(content)
    return path


def encrypted_zip(path: Path) -> Path:
    zipped(path, ("a.mp4", b"a"))
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + offset] |= 1
    path.write_bytes(content)
    return path


def nul_zip(path: Path) -> Path:
    zipped(path, ("aXb.mp4", b"a"))
    path.write_bytes(path.read_bytes().replace(b"aXb.mp4", b"a\0b.mp4"))
    return path


def cut_off(path: Path) -> Path:
    whole = tar(path, ("a.mp4", bytes(range(256)) * 400)).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def damaged(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


Maker = Callable[[Path], Path]
ODD_NAMES = [
    "../a.mp4", "clips/../../a.mp4", "/tmp/vlm_pg_attack.mp4", "clips/..", "a//b.mp4", "clips/./a.mp4", "C:\\a.mp4",
    "..\\a.mp4", "a\\b.mp4", "a:b.mp4", "a\nb.mp4", "a\x1b[2J.mp4", "\u202egpj.mp4", "clips /a.mp4", "a./b.mp4",
    ".bashrc", ".git/hooks/post-checkout", "x" * 300 + ".mp4", "d/" * 40 + "a.mp4", "a?.mp4", "a|b.mp4", "",
]  # fmt: skip
HOSTILE: dict[str, tuple[str, Maker]] = {
    **{
        f"tar name {name[:12]!r}": (".tar", lambda path, name=name: tar(path, (name, b"x"), mode="w"))
        for name in ODD_NAMES
    },
    "zip name": (".zip", lambda path: zipped(path, ("../a.mp4", b"x"))),
    "symbolic link": (".tar.gz", lambda path: tar(path, special("a.mp4", tarfile.SYMTYPE, "/etc/passwd"))),
    "link to a folder outside": (
        ".tar.gz",
        lambda path: tar(path, special("out", tarfile.SYMTYPE, "/tmp"), ("out/vlm_pg_attack.mp4", b"x")),
    ),
    "link inside": (".tar.gz", lambda path: tar(path, ("b.mp4", b""), special("a.mp4", tarfile.SYMTYPE, "b.mp4"))),
    "hard link": (".tar.gz", lambda path: tar(path, special("a.mp4", tarfile.LNKTYPE, "/etc/passwd"))),
    "device": (".tar.gz", lambda path: tar(path, special("a.mp4", tarfile.CHRTYPE))),
    "block device": (".tar.gz", lambda path: tar(path, special("a.mp4", tarfile.BLKTYPE))),
    "pipe": (".tar.gz", lambda path: tar(path, special("a.mp4", tarfile.FIFOTYPE))),
    "link in a zip": (".zip", lambda path: zipped(path, (zip_link("a.mp4"), b"/etc/passwd"))),
    "two of one name": (".tar.gz", lambda path: tar(path, ("a.mp4", b"1"), ("a.mp4", b"2"))),
    "two names that some disks take for one": (".zip", lambda path: zipped(path, ("a.mp4", b"1"), ("A.MP4", b"2"))),
    "a file as a folder": (".tar.gz", lambda path: tar(path, ("a", b"1"), ("a/b.mp4", b"2"))),
    "a folder as a file": (".tar.gz", lambda path: tar(path, ("a/b.mp4", b"2"), ("a", b"1"))),
    "bomb": (".tar.gz", gzip_bomb),
    "bomb in a zip": (".zip", lambda path: zipped(path, ("a.mp4", b"\0" * (8 << 20)))),
    "bomb of many": (".zip", lambda path: zipped(path, *((f"{n}.mp4", b"\0" * 100_000) for n in range(40)))),
    "too many": (".tar.gz", lambda path: tar(path, *((f"{n}.mp4", b"") for n in range(51)))),
    "a size that is not there": (".tar.gz", lying_gzip),
    "a header without end": (".tar.gz", long_header),
    "a size that lies": (".zip", lying_zip),
    "overlapping entries": (".zip", overlapping_zip),
    "encrypted": (".zip", encrypted_zip),
    "a NUL in a name": (".zip", nul_zip),
    "a method that takes memory": (".zip", lambda path: zipped(path, ("a.mp4", b"x"), method=zipfile.ZIP_LZMA)),
    "cut off": (".tar.gz", cut_off),
    "no archive": (".zip", lambda path: damaged(path, b"PK")),
    "no tar": (".tar", lambda path: damaged(path, b"x" * 2000)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused_and_leave_nothing(tmp_path: Path, name: str) -> None:
    suffix, make = HOSTILE[name]
    folder = tmp_path / "media"
    folder.mkdir()
    path = make(folder / f"v{suffix}")
    with pytest.raises(
        ConfigError, match=r"is refused: .*\. Regular files|cannot be unpacked: .*\. A complete archive"
    ):
        unpack(path, SMALL)
    assert [*tmp_path.rglob("*")] == [folder, path] and not Path("/tmp/vlm_pg_attack.mp4").exists()


def test_nothing_is_written_through_a_link_in_the_folder(tmp_path: Path) -> None:
    media, outside = tmp_path / "media", tmp_path / "outside"
    media.mkdir()
    outside.mkdir()
    (media / "clips").symlink_to(outside)
    with pytest.raises(ConfigError, match="a link that leads out of the folder"):
        unpack(tar(media / "v.tar.gz", ("clips/a.mp4", b"x")), SMALL)
    assert not list(outside.iterdir())


def test_a_full_disk_is_no_reason_to_fill_it(tmp_path: Path) -> None:
    path = tar(tmp_path / "v.tar.gz", ("a.mp4", bytes(range(256)) * 40))
    with pytest.raises(ConfigError, match="its files are larger than 0 bytes"):
        unpack(path, Limits(free_bytes=1 << 62))
