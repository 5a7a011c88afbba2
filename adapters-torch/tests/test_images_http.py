"""Images through the server: what damaged ones leave behind, and whom large ones hold up."""

from __future__ import annotations

import base64
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from sie_core.config import ServerConfig
from sie_core.http import create_app
from sie_core.memory.emulated import EmulatedDevice
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings
from sie_core.serving import Service

pytest.importorskip("PIL", reason="images need Pillow: pip install 'sie-adapters-torch[images]'")

from PIL import Image

Serve = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serve(make: Any, dual_encoders: dict[str, Path], tiny_bert: Path) -> Serve:
    """A server with ``clip`` and, for neighbours, ``texts``."""

    @asynccontextmanager
    async def running(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        device, ledger, plugins = EmulatedDevice("emulated:0", 16 * 1024 * 1024), Ledger(), Plugins.load()
        ledger.add_account("host", total=1 << 34)
        ledger.add_account(device.name, total=device.total())
        registry = Registry(plugins, ledger, [device], RegistrySettings(load_wait_s=60))
        registry.apply([make.spec(dual_encoders["clip"], "torch-image-text"), make.spec(tiny_bert)])
        await registry.start()
        service = Service(registry)
        app = create_app(service, ServerConfig(**settings), plugins=plugins)
        try:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
            ) as http:
                yield http
        finally:
            await registry.shutdown(20.0)
            service.close()

    return running


def file_of(image: Image.Image, form: str = "PNG") -> bytes:
    stream = BytesIO()
    image.save(stream, form)
    return stream.getvalue()


async def encoded(http: httpx.AsyncClient, *files: bytes) -> httpx.Response:
    items = [{"images": [{"data": base64.b64encode(file).decode()}]} for file in files]
    return await http.post("/v1/encode/clip", json={"items": items})


async def test_a_thousand_damaged_images_leave_nothing_behind(serve: Serve) -> None:
    """F2: with no help of the garbage collector; each kept its pixels, by a cycle through its error's traceback."""
    whole = file_of(Image.effect_noise((64, 64), 50))
    damaged = [whole[: len(whole) // 2], whole[:-30], whole[:200] + b"\0" * 300 + whole[500:]]

    def left() -> Counter[str]:
        kinds = (Image.Image, BytesIO)
        return Counter(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), kinds))

    async with serve() as http:
        assert (await encoded(http, whole)).status_code == 200
        gc.collect()
        gc.disable()
        try:
            before = left()
            for number in range(1000):
                answer = await encoded(http, damaged[number % len(damaged)])
                assert answer.status_code == 400, answer.text
            assert left() - before <= Counter()
        finally:
            gc.enable()


async def test_images_in_the_openai_dialect(serve: Serve) -> None:
    """C8: ``modality: image`` gives the image's vector; its data URL is no text for a model that sees."""
    file = file_of(Image.effect_noise((48, 32), 50))
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    async with serve() as http:
        pasted = await http.post("/v1/embeddings", json={"model": "clip", "input": ["a cat", url]})
        native = (await encoded(http, file)).json()["items"][0]["dense"]["values"]
        seen = await http.post("/v1/embeddings", json={"model": "clip", "input": [url], "modality": "image"})
    assert (pasted.status_code, pasted.json()["error"]["index"]) == (400, 1)
    assert seen.json()["data"][0]["embedding"] == pytest.approx(native, abs=1e-6)
