"""Images in requests: how they may be sent, how large they may be, and what is never fetched."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from sie_core import BodyTooLarge, GenerateRequest, InvalidInput, Item
from sie_core.http.images import Pictures
from sie_core.http.limits import Limits
from sie_core.http.pixels import Malformed, Truncated, size_of
from sie_core.http.remote import Address, RemoteImages, is_public
from sie_testing import FakeStreamEngine, FaultPoints, expected_vector
from website import Start, until

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int = 1, height: int = 1) -> bytes:
    """A whole PNG of black pixels."""

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (width + 1) * min(height, 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PIXEL = png()
TEXT = base64.b64encode(PIXEL).decode()
DATA_URL = f"data:image/png;base64,{TEXT}"
VECTOR = expected_vector(hashlib.blake2b(PIXEL, digest_size=4).hexdigest()).tolist()


@pytest.mark.parametrize(
    "image",
    [
        {"data": TEXT, "format": "png"},
        {"data": TEXT},
        {"data": DATA_URL},
        TEXT,
        DATA_URL,
        f"DATA:image/png;BASE64,{TEXT}",
        f"data:;base64,{TEXT}",
        {"url": DATA_URL},
        {"type": "image_url", "image_url": {"url": DATA_URL}},
        {"type": "image_url", "image_url": DATA_URL},
    ],
)
async def test_every_way_to_send_an_image(served: Start, image: Any) -> None:
    async with served() as s:
        response = await s.encode("looker", items=[{"images": [image]}])
    assert response.status_code == 200, response.text
    assert response.json()["items"][0]["dense"]["values"] == pytest.approx(VECTOR)


async def test_bytes_in_msgpack(served: Start) -> None:
    body = msgspec.msgpack.encode({"items": [{"images": [{"data": PIXEL, "format": "png"}]}, {"text": "hello"}]})
    async with served() as s:
        response = await s.http.post("/v1/encode/looker", content=body, headers=MSGPACK)
    values = [one["dense"]["values"] for one in msgspec.msgpack.decode(response.content)["items"]]
    assert values[0][b"data"] == expected_vector(hashlib.blake2b(PIXEL, digest_size=4).hexdigest()).tobytes()
    assert values[1][b"data"] == expected_vector("hello").tobytes()


BAD: list[tuple[Any, str]] = [
    (7, "an image must be"),
    (None, "an image must be"),
    ({}, "an image must be"),
    ({"data": ""}, "an image must be"),
    ({"data": 7}, "an image must be"),
    ({"data": [1, 2]}, "an image must be"),
    ({"image_url": {"detail": "low"}}, "an image must be"),
    ("not base64!", "base64 is broken"),
    (TEXT[:-3], "base64 is broken or truncated"),
    (f"data:image/png;base64,{TEXT[:-3]}", "base64 is broken or truncated"),
    ("data:image/png;base64", "a data URL must be"),
    (f"data:image/png,{TEXT}", "a data URL must be"),
    (f"data:text/html;base64,{TEXT}", "a data URL must be"),
    (base64.b64encode(PIXEL[:20]).decode(), "truncated"),
    (base64.b64encode(b"\xff\xd8\xff\xe0").decode(), "truncated"),
    (base64.b64encode(png(0, 1)).decode(), "no pixels"),
    (base64.b64encode(png(100_000, 100_000)).decode(), "100000 x 100000 pixels"),
    ("ftp://example.org/a.png", "base64 is broken"),
    ("file:///etc/passwd", "base64 is broken"),
]


@pytest.mark.parametrize(("image", "message"), BAD)
async def test_bad_images_are_named(served: Start, image: Any, message: str) -> None:
    async with served() as s:
        response = await s.encode("looker", items=[{"text": "fine"}, {"images": [DATA_URL, image]}])
        after = await s.encode("looker", items=[{"images": [DATA_URL]}])
    detail = response.json()["detail"]
    assert response.status_code == 400, detail
    assert (detail["param"], detail["index"]) == ("items", 1)
    assert message in detail["message"]
    assert after.status_code == 200


async def test_limits_of_images(served: Start) -> None:
    big = base64.b64encode(PIXEL + bytes(2000)).decode()
    wide = base64.b64encode(png(60, 60)).decode()
    async with served(max_image_bytes=1000, max_images=12, max_image_pixels=4000, max_item_bytes=10) as s:
        bytes_ = await s.encode("looker", items=[{"text": "fine"}, {"images": [big]}])
        count = await s.encode("looker", items=[{"images": [TEXT] * 6}, {"images": [TEXT] * 7}])
        fits = await s.encode("looker", items=[{"images": [TEXT] * 6}, {"images": [TEXT] * 6}])
        pixels = await s.encode("looker", items=[{"images": [wide]} for _ in range(9)])
    assert (bytes_.status_code, bytes_.json()["detail"]["index"]) == (413, 1)
    assert "server.max_image_bytes" in bytes_.json()["detail"]["message"]
    assert (count.status_code, count.json()["detail"]["index"]) == (400, 1)
    assert (pixels.status_code, pixels.json()["detail"]["index"]) == (400, 8)
    assert fits.status_code == 200


async def test_a_model_without_eyes_says_so(served: Start) -> None:
    async with served() as s:
        response = await s.encode("mini", items=[{"text": "fine"}, {"images": [DATA_URL]}])
    assert response.status_code == 400
    assert response.json()["detail"]["index"] == 1
    assert response.json()["detail"]["supported"] == ["text"]


# --- how large is it -----------------------------------------------------------------------------------

WEBP = b"RIFF\x00\x00\x00\x00WEBP"
SIZES: list[tuple[bytes, tuple[int, int] | None]] = [
    (png(640, 480), (640, 480)),
    (b"GIF89a" + struct.pack("<HH", 3, 5) + bytes(3), (3, 5)),
    (b"BM" + bytes(12) + struct.pack("<Iii", 40, 7, -9), (7, 9)),
    (b"BM" + bytes(12) + struct.pack("<IHH", 12, 7, 9), (7, 9)),
    (WEBP + b"VP8 " + bytes(10) + struct.pack("<HH", 16 | 0x4000, 32), (16, 32)),
    (WEBP + b"VP8L" + bytes(5) + struct.pack("<I", (99) | (49 << 14)), (100, 50)),
    (WEBP + b"VP8X" + bytes(8) + b"\x63\x00\x00\x31\x00\x00", (100, 50)),
    (b"\xff\xd8\xff\xe0\x00\x04ab" + b"\xff\xff\xc2\x00\x11\x08" + struct.pack(">HH", 20, 30), (30, 20)),
    (b"II*\0" + struct.pack("<IHHHIHHHHIHH", 8, 2, 256, 3, 1, 70, 0, 257, 4, 1, 80, 0)[:-2] + bytes(2), (70, 80)),
    (b"some other format", None),
    (b"", None),
]


@pytest.mark.parametrize(("data", "size"), SIZES)
def test_sizes_are_read_from_headers(data: bytes, size: tuple[int, int] | None) -> None:
    assert size_of(data) == size


@pytest.mark.parametrize("data", [data for data, size in SIZES if size is not None])
def test_every_cut_of_a_header_is_truncated_or_no_format(data: bytes) -> None:
    whole = size_of(data)
    for length in range(len(data)):
        try:
            found = size_of(data[:length])
        except Truncated:
            continue
        assert found in (None, whole) or data.startswith(b"II"), length


PARTS = [
    b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000,
    PIXEL[:33] + chunk(b"tEXt", b"") * 100_000,
    b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\x01x" * 300_000,
    WEBP + b"VP8X" + struct.pack("<I", 10) + bytes(10) + b"JUNK\0\0\0\0" * 100_000,
    b"II*\0" + struct.pack("<IH", 8, 65535) + bytes(12 * 65535) + struct.pack("<I", 9) + b"\0" * 10**6,
]


@pytest.mark.parametrize("data", PARTS)
def test_a_file_made_of_parts_ends_the_search(data: bytes) -> None:
    with pytest.raises((Malformed, Truncated)):
        size_of(data)


def gif_frame(left: int, top: int, width: int, height: int) -> bytes:
    return b"\x2c" + struct.pack("<HHHHB", left, top, width, height, 0) + b"\x02\x02\x44\x01\x00"


def tiff_page(width: int, height: int, following: int, *more: tuple[int, int, int]) -> bytes:
    tags = [(256, 4, width), (257, 4, height), *more]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return struct.pack("<H", len(tags)) + body + struct.pack("<I", following)


SMALL, LARGE = 10, 60_000
WALKED = PIXEL[:33]
VP8L = b"VP8L" + struct.pack("<IBI", 6, 0x2F, 16382 | 16382 << 14) + b"\0"
FRAME = b"ANMF" + struct.pack("<I", 24) + bytes(6) + b"\x5f\xea\0" * 2 + bytes(4)
SOF = b"\xff\xc0\x00\x11\x08%b\x03" + bytes(9)
EVASIONS: dict[str, bytes] = {
    "GIF, a small screen": b"GIF89a" + struct.pack("<HH", SMALL, SMALL) + bytes(3) + gif_frame(0, 0, LARGE, LARGE),
    "GIF, placed far out": b"GIF89a" + struct.pack("<HH", SMALL, SMALL) + bytes(3) + gif_frame(LARGE, LARGE, 1, 1),
    "GIF, its second frame": b"GIF89a"
    + struct.pack("<HH", 1, 1)
    + bytes(3)
    + gif_frame(0, 0, 1, 1)
    + b"\x21\xf9\x04\0\0\0\0\0"
    + gif_frame(0, 0, LARGE, LARGE)
    + b";",
    "PNG, a second header": png()[:33] + png(LARGE, LARGE)[8:],
    "PNG, a header after the data": png()[:-12] + png(LARGE, LARGE)[8:],
    "PNG, a frame of an animation": WALKED
    + chunk(b"fcTL", struct.pack(">III", 0, LARGE, LARGE) + bytes(14))
    + png()[33:],
    "PNG, its header later": b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt", bytes(13)) + png()[8:],
    "JPEG, two frames": b"\xff\xd8"
    + SOF % struct.pack(">HH", 8, 8)
    + SOF % struct.pack(">HH", LARGE, LARGE)
    + b"\xff\xda",
    "JPEG, a frame in what may be a segment": b"\xff\xd8\xff\x00\x00\x15"
    + SOF % struct.pack(">HH", LARGE, LARGE)
    + SOF % struct.pack(">HH", 8, 8)
    + b"\xff\xda",
    "WebP, larger than its canvas": WEBP + b"VP8X" + struct.pack("<I", 10) + bytes(10) + VP8L,
    "WebP, a frame of an animation": WEBP + b"VP8X" + struct.pack("<I", 10) + bytes(10) + FRAME + VP8L,
    "RIFF, and no WebP": b"RIFF" + bytes(4) + b"WAVE" + bytes(40),
    "BMP, a width without a sign": b"BM" + bytes(12) + struct.pack("<III", 40, 2**32 - 1, 1),
    "BMP, a header of another size": b"BM" + bytes(12) + struct.pack("<IHH", 16, 1, 1) + bytes(20),
    "TIFF, its second page": b"II*\0" + struct.pack("<I", 8) + tiff_page(1, 1, 38) + tiff_page(LARGE, LARGE, 0),
    "TIFF, its tiles": b"II*\0" + struct.pack("<I", 8) + tiff_page(1, 1, 0, (322, 4, LARGE), (323, 4, LARGE)),
    "TIFF, two widths": b"II*\0" + struct.pack("<I", 8) + tiff_page(1, 1, 0, (256, 4, LARGE)),
    "TIFF, its width as another type": b"II*\0" + struct.pack("<I", 8) + tiff_page(1, 1, 0, (256, 16, LARGE)),
    "TIFF, of the large kind": b"II+\0" + bytes(60),
    "some other format": b"\0\0\0\x1cftypavif" + bytes(60),
}


@pytest.mark.parametrize("name", EVASIONS)
async def test_no_file_hides_how_large_its_images_are(served: Start, name: str) -> None:
    """F8: every frame of every format is measured; what could be read in two ways, or not at all, is refused."""
    async with served() as s:
        images = [DATA_URL, base64.b64encode(EVASIONS[name]).decode()]
        response = await s.encode("looker", items=[{"images": [image]} for image in images])
    assert (response.status_code, response.json()["detail"]["index"]) == (400, 1), response.text


# --- images that are elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://example.org/a.png", "HTTPS://example.org/a.png"])
async def test_nothing_is_fetched_unless_it_is_allowed(served: Start, url: str) -> None:
    async with served() as s:
        response = await s.encode("looker", items=[{"text": "fine"}, {"images": [{"url": url}]}])
        scored = await s.http.post("/v2/embed", json={"model": "looker", "images": [url]})
    detail = response.json()["detail"]
    assert (response.status_code, detail["index"]) == (400, 1)
    assert "server.allow_image_urls" in detail["message"]
    assert scored.status_code == 400


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::]", "10.0.0.1", "192.168.1.1", "172.16.0.1"),
        *("169.254.169.254", "[fe80::1]", "[fd00::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "2130706433", "0x7f.1", "127.1"),
        *("[fec0::1]", "[64:ff9b:1::a00:1]", "[::127.0.0.1]"),
    ],
)
async def test_no_address_of_the_inside_is_asked_even_where_fetching_is_allowed(served: Start, host: str) -> None:
    async with served(allow_image_urls=True) as s:
        response = await s.encode("looker", items=[{"images": [{"url": f"http://{host}:9/a.png"}]}])
    detail = response.json()["detail"]
    assert (response.status_code, detail["index"]) == (400, 0)
    assert "not on the open internet" in detail["message"]


PUBLIC = {
    **{"93.184.216.34": True, "2606:4700::1111": True, "::ffff:8.8.8.8": True, "2001:0:4136:e378::": False},
    **{"168.63.129.16": False, "::ffff:168.63.129.16": False, "64:ff9b::a83f:8110": False},
}


@pytest.mark.parametrize(("address", "public"), PUBLIC.items())
def test_which_addresses_are_public(address: str, public: bool) -> None:
    """F15: 168.63.129.16 lies in a public range, and is the host of Azure's machines."""
    assert is_public(ipaddress.ip_address(address)) is public


@asynccontextmanager
async def answering(*answers: bytes, silent: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers each connection with the next of ``answers``, and keeps what it was asked."""
    asked: list[bytes] = []
    over, at_work = asyncio.Event(), 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_work
        at_work += 1
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if silent:
            await over.wait()
        writer.write(answers[min(len(asked), len(answers)) - 1])
        writer.close()
        at_work -= 1

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://pictures.test:{server.sockets[0].getsockname()[1]}", asked
        over.set()
        await until(lambda: not at_work)


async def home(host: str, port: int) -> Sequence[Address]:
    return [ipaddress.ip_address("127.0.0.1" if host == "pictures.test" else "10.0.0.9")]


def anywhere(address: Address) -> bool:
    return str(address) == "127.0.0.1"


def whole(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


async def test_an_image_is_fetched_from_the_address_that_was_checked() -> None:
    async with answering(whole(PIXEL)) as (url, asked):
        data = await RemoteImages(permits=anywhere, resolve=home).fetch(f"{url}/a.png?x=1", 1000)
    assert data == PIXEL
    assert asked[0].startswith(b"GET /a.png?x=1 HTTP/1.1\r\n")
    assert b"host: pictures.test:" in asked[0].lower()


async def test_redirects_are_followed_a_few_times_and_checked_like_the_first_address() -> None:
    remote = RemoteImages(permits=anywhere, resolve=home)
    moved = whole(b"", "302 Found", "location: /b.png\r\n")
    async with answering(moved, whole(PIXEL)) as (url, asked):
        assert await remote.fetch(f"{url}/a.png", 1000) == PIXEL
        assert asked[1].startswith(b"GET /b.png ")
    async with answering(moved) as (url, asked):
        with pytest.raises(InvalidInput, match="redirected more than 3 times"):
            await remote.fetch(url, 1000)
        assert len(asked) == 4
    inside = ("http://inside.test/x", "http://10.0.0.1/x", "file:///etc/passwd", "http://a:b@pictures.test/")
    for target in (*inside, "http://[", "http://pictures.test:x/", "http://" + "a" * 5000):
        async with answering(whole(b"", "302 Found", f"location: {target}\r\n")) as (url, asked):
            with pytest.raises(InvalidInput):
                await remote.fetch(url, 1000)
            assert len(asked) == 1


async def test_what_is_too_large_or_too_slow_or_not_there() -> None:
    remote = RemoteImages(permits=anywhere, resolve=home, timeout_s=0.3)
    async with answering(whole(bytes(2000))) as (url, _):
        with pytest.raises(BodyTooLarge, match="more than 1000 bytes"):
            await remote.fetch(url, 1000)
    async with answering(whole(PIXEL), silent=True) as (url, _):
        with pytest.raises(InvalidInput, match=r"within 0\.3 s"):
            await remote.fetch(url, 1000)
    async with answering(whole(b"", "404 Not Found")) as (url, _):
        with pytest.raises(InvalidInput, match="answered 404"):
            await remote.fetch(url, 1000)
    async with answering(b"nonsense\r\n\r\n") as (url, _):
        with pytest.raises(InvalidInput, match="can't be fetched"):
            await remote.fetch(url, 1000)
    for bad in ("http://", "http://[", "http://" + "a" * 5000, "http://pictures.test:0/"):
        with pytest.raises(InvalidInput):
            await remote.fetch(bad, 1000)


@pytest.mark.parametrize("host", ["a" * 64 + ".test", "a..test", "\u00fc" * 70 + ".test"])
async def test_hosts_that_cannot_be_looked_up_are_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match="can't be fetched"):
        await RemoteImages().fetch(f"http://{host}/a.png", 1000)


async def test_fetched_images_take_the_place_of_their_addresses(served: Start) -> None:
    async with answering(whole(PIXEL)) as (url, _), served(allow_image_urls=True) as s:
        site = s.app._site
        object.__setattr__(site, "remote", RemoteImages(permits=anywhere, resolve=home))
        response = await s.encode("looker", items=[{"text": "hello"}, {"images": [DATA_URL, {"url": url}]}])
        alone = await s.encode("looker", items=[{"images": [DATA_URL, DATA_URL]}])
    assert response.status_code == 200, response.text
    assert response.json()["items"][1] == alone.json()["items"][0]


async def several(remote: RemoteImages, urls: Sequence[str], body_bytes: int = 10_000) -> Sequence[bytes]:
    pictures = Pictures(Limits(body_bytes=body_bytes, item_bytes=10, items=10, body_s=1.0))
    images = pictures.read_all([{"url": url} for url in urls], 0, "items")
    items, _ = await pictures.complete([Item(images=images)], None, remote)
    return items[0].images


async def test_images_of_a_request_are_fetched_side_by_side_and_keep_their_order() -> None:
    sizes = [png(width, 1) for width in range(1, 7)]
    begun: list[str] = []
    four = asyncio.Event()

    class Together(RemoteImages):
        async def fetch(self, url: str, limit: int) -> bytes:
            begun.append(url)
            if len(begun) == 4:
                four.set()
            await four.wait()
            return sizes[int(url[-1])]

    urls = [f"http://pictures.test/{number}" for number in range(6)]
    assert list(await several(Together(timeout_s=5.0), urls)) == sizes
    assert begun[:4] == urls[:4]


async def test_images_of_a_request_have_a_size_and_a_time_together() -> None:
    remote = RemoteImages(permits=anywhere, resolve=home, timeout_s=0.3)
    async with answering(whole(PIXEL)) as (url, _):
        assert await several(remote, [url] * 3, 3 * len(PIXEL))
        with pytest.raises(BodyTooLarge, match="together") as caught:
            await several(remote, [url] * 4, 3 * len(PIXEL))
        assert caught.value.index == 0
    async with answering(whole(PIXEL), silent=True) as (url, _):
        with pytest.raises(InvalidInput, match=r"within 0\.3 s"):
            await several(remote, [url] * 12)


# --- images in messages --------------------------------------------------------------------------------


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "sees", "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, *parts]}]}


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (shown("http://example.org/a.png"), "server.allow_image_urls"),
        (shown("file:///etc/passwd"), "must be a data URL"),
        (shown("/etc/passwd"), "must be a data URL"),
        (shown(DATA_URL[:-3]), "base64 is broken or truncated"),
        (shown("data:image/png;base64," + base64.b64encode(png(100_000, 100_000)).decode()), "100000 x 100000"),
        ({"type": "image_url", "image_url": "http://example.org/a.png"}, "server.allow_image_urls"),
        ({"type": "video_url", "video_url": {"url": "http://example.org/a.mp4"}}, "must be a data URL"),
        ({"type": "audio_url", "audio_url": {"url": "/etc/passwd"}}, "must be a data URL"),
    ],
)
async def test_no_engine_is_given_an_address_to_fetch_or_a_file_to_open(
    served: Start, part: dict[str, Any], message: str
) -> None:
    async with served() as s:
        refused = await s.http.post("/v1/chat/completions", json=chat(part))
        fine = await s.http.post("/v1/chat/completions", json=chat(shown(DATA_URL)))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["index"]) == (400, "messages", 0)
    assert message in error["message"]
    assert fine.status_code == 200


async def test_what_messages_show_is_fetched_where_that_is_allowed(
    served: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    generate = FakeStreamEngine.generate

    async def keep(self: FakeStreamEngine, request: GenerateRequest) -> Any:
        asked.append(request.body["messages"][0]["content"][1])
        return await generate(self, request)

    monkeypatch.setattr(FakeStreamEngine, "generate", keep)
    async with answering(whole(PIXEL)) as (url, _), served(allow_image_urls=True) as s:
        object.__setattr__(s.app._site, "remote", RemoteImages(permits=anywhere, resolve=home))
        response = await s.http.post("/v1/chat/completions", json=chat(shown(url)))
        inside = await s.http.post("/v1/chat/completions", json=chat(shown("http://10.0.0.1/a.png")))
    assert response.status_code == 200, response.text
    assert asked == [shown(f"data:image;base64,{TEXT}")]
    assert inside.status_code == 400


# --- images that take their time -----------------------------------------------------------------------


async def test_images_are_prepared_beside_everything_else(served: Start) -> None:
    """F6: while one image is decoded, the model's own texts and other models answer; it holds no right to run."""
    async with served() as s:
        assert (await s.encode("looker", items=[{"images": [DATA_URL]}])).status_code == 200
        latch = FaultPoints.of("looker").hold("prepare", times=1)
        looking = asyncio.create_task(s.encode("looker", items=[{"images": [DATA_URL]}] * 60))
        await latch.arrival()
        assert (await s.encode("looker")).status_code == 200
        assert (await s.embed()).status_code == 200
        latch.release()
        assert (await looking).status_code == 200


async def test_nothing_is_prepared_for_a_client_that_left(listening: Start) -> None:
    """F6: what was not begun when it left is never begun."""
    async with listening() as s:
        assert (await s.encode("looker", items=[{"images": [DATA_URL]}])).status_code == 200
        faults = FaultPoints.of("looker")
        before, latch = faults.hits("prepare"), faults.hold("prepare", times=1)
        looking = asyncio.create_task(s.encode("looker", items=[{"images": [DATA_URL]}] * 60))
        await latch.arrival()
        looking.cancel()
        await until(lambda: s.registry.status("looker").leases == 0)
        latch.release()
        assert (await s.encode("looker", items=[{"images": [DATA_URL]}])).status_code == 200
        assert faults.hits("prepare") == before + 2


async def test_requests_with_images_take_turns(served: Start) -> None:
    """F6: a request of many images is prepared in pieces, between which others have theirs."""
    async with served() as s:
        faults = FaultPoints.of("looker")
        assert (await s.encode("looker", items=[{"images": [DATA_URL]}])).status_code == 200
        latch = faults.hold("prepare", times=1)
        faults.delay("prepare", 0.011)
        many = asyncio.create_task(s.encode("looker", items=[{"images": [DATA_URL]}] * 60))
        await latch.arrival()
        one = asyncio.create_task(s.encode("looker", items=[{"images": [DATA_URL]}]))
        await until(lambda: s.registry.status("looker").leases == 2)
        latch.release()
        assert (await one).status_code == 200
        assert not many.done()
        answer = await many
    assert [item["dense"]["values"] for item in answer.json()["items"]] == [pytest.approx(VECTOR)] * 60


async def test_an_image_that_is_refused_late_is_named(served: Start) -> None:
    """F6: the index is that of the request, not of the piece."""
    async with served() as s:
        FaultPoints.of("looker").fail("prepare", InvalidInput("torn", index=0), after=40, times=1)
        answer = await s.encode("looker", items=[{"images": [DATA_URL]}] * 60)
    assert (answer.status_code, answer.json()["detail"]["index"]) == (400, 40), answer.text


async def test_texts_by_the_megabyte_are_prepared_beside_everything_else(served: Start) -> None:
    """F6: a sibling: long texts are prepared in pieces, too."""
    async with served() as s:
        assert (await s.embed()).status_code == 200
        latch = FaultPoints.of("mini").hold("prepare", times=1)
        slow = asyncio.create_task(s.embed(input=["word " * 20_000] * 10, truncate=True))
        await latch.arrival()
        assert (await s.embed()).status_code == 200
        latch.release()
        assert (await slow).status_code == 200
        assert FaultPoints.of("mini").hits("prepare") == 12
