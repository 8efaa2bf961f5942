"""Seeded URLs, usual and hostile, and what an independent reading of them allows to be connected to."""

from __future__ import annotations

import ipaddress
import random
import re
import socket

SECRET = "s3cr3t"
# every name that there is, and where it is; the door is a server of this machine that rings when somebody comes
NAMES = {
    "public.example": ["93.184.216.34"],
    "xn--exmple-cua.org": ["93.184.216.35"],
    "six.example": ["2606:2800:220:1:248:1893:25c8:1946"],
    "private.example": ["10.0.0.1"],
    "mixed.example": ["93.184.216.36", "127.0.0.1"],
    "localhost": ["127.0.0.1", "::1"],
    "metadata.internal": ["169.254.169.254"],
    "allowed.test": ["127.0.0.1"],
    "old.example": ["::127.0.0.1"],
    "site.example": ["fec0::1"],
}
ALLOWED = ("allowed.test", "127.9.9.9")
HOSTS = [
    *[*NAMES] * 4, "exämple.org", "EXÄMPLE.org", "PUBLIC.example", "public.example.", "localhost.", "LOCALHOST",
    "127.0.0.1", "127.1",
    "2130706433", "017700000001", "0x7f000001", "0x7f.1", "127.0.0.1.", "127.9.9.9", "127.0.9.9.9", "0", "0.0.0.0",
    "10.1",
    "192.168.1.1", "169.254.169.254", "3232235777", "255.255.255.255", "224.0.0.1", "100.64.0.1", "93.184.216.34",
    "1572395042",
    "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[fe80::1]", "[fe80::1%25lo]",
    "[fe80::1%lo]",
    "[::1%25lo]", "[fc00::1]", "[fec0::1]", "[64:ff9b::7f00:1]", "[64:ff9b::5db8:d822]", "[2002:7f00:1::]", "[2001::1]",
    "[2606:2800:220:1:248:1893:25c8:1946]", "[v1.public.example]", "[public.example]", "[::1", "::1", "1::1", "[]",
    "[::1]x",
    "x[::1]", "[[::1]]", "", ".", "..", "a..b", "-", "_", "a" * 63, "a" * 64, "a." * 200, "a" * 5000, "１２７.０.０.１",
    "１２７。０。０。１",
    "①②⑦.⓪.⓪.①", "ⓛocalhost", "local\u00adhost", "loc\u200balhost", "ﬁle", "ß.example", "\u202epublic.example",
    "127%2e0%2e0%2e1",
    "allowed%2etest", "allowed.test%00", "allowed.test%40127.0.0.1", "allowed.test\\@127.0.0.1",
    "127.0.0.1\\.allowed.test",
    "allowed.test#@127.0.0.1", "allowed.test?@127.0.0.1", "allowed.test/@127.0.0.1", "pub lic.example",
    "public.example%20",
    "public\t.example", "public\r\n.example", "127.0.0.1\n", "\x00", "\x7f", "\ud83d", "a,b", "a;b", "a*b", "a|b",
    "a'b", "$HOST",
    "{host}", "<public.example>", "xn--", "xn--a", "xn--ls8h", "\U0001f600.example", "0x", "08", "1.2.3.4.5",
    "256.1.1.1", "1e3",
]  # fmt: skip
USERS = [
    "",
    "",
    "",
    "",
    "",
    f"user:{SECRET}@",
    f"{SECRET}@",
    ":@",
    "@",
    f"user:{SECRET}@x@",
    f"a:{SECRET}/b@",
    f"a%40:{SECRET}@",
]
PORTS = [
    "", "", "", "", ":", ":80", ":0", ":65535", ":65536", ":99999", ":-1", ":+80", ":080", ":8 0", ":８０", ":x",
    ":80:80",
         ":%38%30", ":" + "9" * 5000]  # fmt: skip
PATHS = [
    "/x.mp4", "/x.mp4", "/x.mp4", "/a b/é.mp4", "/%2e%2e/x.mp4", "/../x.mp4", "//x.mp4", "/x.mp4/", "/x.exe", "",
    "/\\x.mp4",
         "/\r\nHost: 127.0.0.1\r\n/x.mp4", "/\x00.mp4", "/\ud83d.mp4", "/" + "x" * 100_000 + ".mp4", "/%zz.mp4",
         "/x.mp4;a=b",
         "/@127.0.0.1/x.mp4", "/http://127.0.0.1/x.mp4", "\\x.mp4", "/x.mp4 HTTP/1.1\r\nX: y"]  # fmt: skip
ENDS = ["", "", f"?token={SECRET}", f"?{SECRET}#x.mp4", "#" + SECRET, "?\r\nX: y", "?é", "?@127.0.0.1/x.mp4"]
SCHEMES = [
    "http", "http", "http", "http", "HTTP", "https", "hTTps", "ftp", "file", "gopher", "data", "concat", "ffconcat",
    "http+unix",
           "rtsp", "javascript", "http ", " http", "ht\ntp", "http:http", "file://http", "url:http",
           "\u212attp"]  # fmt: skip
SLASHES = ["://"] * 12 + [":/", ":", ":///", ":\\\\", "://///", ":/\\", "：//"]
SPECIAL = "@:/\\?#[]%.&;,<>|^ \t\r\n\x00\x7f\x80éﬁ。．⁄０\u202e\ud83d"


def url(seed: int) -> str:
    """A URL put together of odd parts; two in five have characters changed, too."""
    random_ = random.Random(f"url/{seed}")

    # most parts are usual, so that an odd one is reached
    def part(usual: str, odd: list[str], share: float) -> str:
        return random_.choice(odd) if random_.random() < share else usual

    host = random_.choice(HOSTS)
    user, port = part("", USERS, 0.25), part("", PORTS, 0.3)
    scheme, slashes = part("http", SCHEMES, 0.3), part("://", SLASHES, 0.15)
    path = part("/x.mp4", PATHS, 0.25)
    text = scheme + slashes + user + host + port + path + random_.choice(ENDS)
    if random_.random() < 0.4:
        for _ in range(random_.choice((1, 1, 2, 4))):
            offset = random_.randrange(min(len(text), 60))
            match random_.randrange(4):
                case 0:
                    text = text[:offset] + random_.choice(SPECIAL) + text[offset:]
                case 1:
                    text = text[:offset] + text[offset + 1 :]
                case 2:
                    text = text[:offset] + f"%{ord(text[offset]) % 256:02x}" + text[offset + 1 :]
                case 3:
                    text = text[:offset] + text[offset:].swapcase()
    return text


_STRICT = re.compile(
    r"(https?)://(\[[0-9a-fA-F:.]+(?:%25[A-Za-z0-9]+)?\]|[^\s/?#@:\\\[\]%]+)(?::([0-9]{0,9}))?(?:[/?#].*)?",
    re.IGNORECASE | re.DOTALL,
)


def allowed_connections(text: str) -> set[tuple[str, int]]:
    """Where somebody who means ``text`` may be led to: addresses and ports, none for what is no plain URL."""
    found = _STRICT.fullmatch(text.removeprefix("file://"))
    if not found or re.search("[\x00-\x1f\x7f]", text):
        return set()
    port = int(found[3]) if found[3] else {"http": 80, "https": 443}[found[1].lower()]
    host = found[2].strip("[]").lower()
    if ":" not in host:
        try:
            host = host.encode("idna").decode()
        except UnicodeError:
            return set()
    addresses = look_up(host)
    if host not in ALLOWED and any(_is_inside(address) for address in addresses):
        return set()
    return {(address, port) for address in addresses}


def look_up(host: str) -> list[str]:
    """The addresses of a name, or of an address in any notation."""
    if host.rstrip(".").lower() in NAMES:
        return NAMES[host.rstrip(".").lower()]
    try:
        return [
            str(entry[4][0]) for entry in _getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        ]
    except (OSError, UnicodeError):
        return []


_getaddrinfo = socket.getaddrinfo
_INSIDE_4 = [
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
    )
]  # fmt: skip


def _is_inside(address: str) -> bool:
    """Not of the open Internet, by the tables of RFC 6890 and its successors."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return any(ip in network for network in _INSIDE_4)
    groups = [int(group, 16) for group in ip.exploded.split(":")]
    if groups[:6] in ([0, 0, 0, 0, 0, 0xFFFF], [0x64, 0xFF9B, 0, 0, 0, 0]):
        return _is_inside(str(ipaddress.IPv4Address(groups[6] << 16 | groups[7])))
    if groups[0] == 0x2002:
        return _is_inside(str(ipaddress.IPv4Address(groups[1] << 16 | groups[2])))
    return not 0x2000 <= groups[0] <= 0x3FFF or (groups[0] == 0x2001 and (groups[1] < 0x200 or groups[1] == 0xDB8))
