"""Engines for tests: a stand-in that starts at once, and the real SGLang where an interpreter with it is named."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from attrs import define, field
from sie_adapters_sglang.adapters import EmbeddingAdapter, GenerationAdapter, HiCacheAdapter
from sie_core import DeviceGrant, DeviceView, GenerateRequest, Grant, ModelSpec, Source, TransitionContext
from sie_core.config import ServerConfig
from sie_core.http import create_app
from sie_core.memory.emulated import EmulatedDevice
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings
from sie_core.serving import Service

SUPPORT = Path(__file__).parent / "support"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP: to read the certificates of the world takes longer than the request."""
GIB = 1 << 30
MIB = 1 << 20
KINDS = {
    "sglang-generation": GenerationAdapter,
    "sglang-embedding": EmbeddingAdapter,
    "sglang-hicache": HiCacheAdapter,
}


@define
class Events:
    """Hears what an engine tells the core."""

    deaths: list[str] = field(factory=list)

    def died(self, reason: str, details: str = "") -> None:
        self.deaths.append(f"{reason}\n{details}")

    def request_growth(self, account: str, nbytes: int) -> bool:
        return False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the real one, through whatever fixture, is what has to run with each of its releases."""
    for item in items:
        if {"real", "theirs"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("real")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State and measured figures of a test's own."""
    from sie_adapters_sglang import _plan

    monkeypatch.setenv("SIE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SIE_CACHE_DIR", str(tmp_path / "cache"))
    _plan.cost_cache.cache_clear()
    _plan._totals.clear()
    return tmp_path


def save_model(folder: Path, *, width: int = 8, rows: int = 8) -> Path:
    """A model folder: as much as admission reads of one. Weights take 2 × width × rows bytes, a token 4 × width."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    nbytes = 4 * width * rows
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, nbytes]}}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(header) + nbytes)
    return folder


class Home:
    """Makes models on the stand-in, as if that were an installed SGLang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model_folder = save_model(folder / "model")

    def site(self, version: str = "0.5.20", saver: str | None = None) -> Path:
        """A folder to import from that holds SGLang in this version."""
        site = self.folder / f"site-{version}-{saver}"
        names = {"sglang": version} | ({"torch_memory_saver": saver} if saver else {})
        for name, each in names.items():
            info = site / f"{name}-{each}.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {each}\n")
        return site

    def model(
        self,
        adapter: str = "sglang-generation",
        *,
        version: str = "0.5.20",
        saver: str | None = None,
        how: dict[str, Any] | None = None,
        **options: Any,
    ) -> ModelSpec:
        path = os.pathsep.join([str(SUPPORT / "standin"), str(self.site(version, saver))])
        env = {"PYTHONPATH": path, "STANDIN": json.dumps(how or {}), **options.pop("env", {})}
        settings = {"python": sys.executable, "stop_timeout_s": 2.0} | options
        kind = KINDS[adapter].options
        return ModelSpec("tiny", adapter, Source("path", str(self.model_folder)), options=kind(env=env, **settings))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def context(account: str = "cpu", **more: Any) -> TransitionContext:
    grant = DeviceGrant(static_bytes=8 * GIB, free_bytes=64 * GIB)
    if account.startswith("emulated"):
        device = EmulatedDevice(account, 128 * MIB)
        more.setdefault("device_buffer", lambda _, nbytes: device.allocate(nbytes))
    return TransitionContext(grant=Grant({account: grant}), **more)


def view(account: str = "cpu", total: int = 64 * GIB) -> DeviceView:
    return DeviceView(account, account.partition(":")[0], total=total, free=total, available=total)


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Load a model; its engine is closed when the test ends."""
    engines: list[Any] = []

    def load(model: ModelSpec, *, events: Events | None = None, ctx: TransitionContext | None = None) -> Any:
        engine = KINDS[model.adapter]().load(model, ctx or context(), events or Events())
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        await asyncio.to_thread(engine.close, context())


def told(engine: Any) -> dict[str, Any]:
    """What has happened in a stand-in."""
    answer = httpx.get(f"{engine.url}/standin", trust_env=False, verify=NO_TLS)
    return dict(answer.json())


@pytest.fixture(scope="session")
def helpers() -> Any:
    class Helpers:
        Events = Events
        context = staticmethod(context)
        view = staticmethod(view)
        Card = Card
        told = staticmethod(told)
        support = SUPPORT
        save_model = staticmethod(save_model)
        emulated = staticmethod(lambda account, mib=128: EmulatedDevice(account, mib * MIB))
        request = staticmethod(lambda tokens: GenerateRequest("completion", {"prompt": "hi", "max_tokens": tokens}))

    return Helpers


# --- a whole server, in the test's own event loop ------------------------------------------------------


@define
class Front:
    """The application as a client sees it, and the book behind it."""

    http: httpx.AsyncClient
    registry: Registry
    ledger: Ledger

    async def chat(self, model: str = "tiny", **body: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
        return await self.http.post("/v1/chat/completions", json={"model": model, **body})

    async def act(self, action: str, model: str = "tiny") -> httpx.Response:
        return await self.http.post(f"/v1/admin/models/{model}/{action}", json={})

    async def row(self, model: str = "tiny") -> dict[str, Any]:
        rows = (await self.http.get("/v1/status")).json()["models"]
        return dict(next(row for row in rows if row["name"] == model))

    async def residency(self, model: str = "tiny") -> str:
        return str((await self.row(model))["residency"])

    async def until(self, state: str, model: str = "tiny") -> None:
        async with asyncio.timeout(20):
            while self.registry.status(model).residency != state:
                await asyncio.sleep(0.005)

    def engine(self, model: str = "tiny") -> Any:
        """Its engine, parked ones too."""
        seat = self.registry._roster.records[model].seat
        assert seat is not None
        return seat.engine

    def argv(self, model: str = "tiny") -> list[str]:
        """The command line of its engine."""
        return psutil.Process(self.engine(model).pid).cmdline()

    def booked(self) -> dict[str, int]:
        """What the book holds, by account."""
        found: dict[str, int] = {}
        for claim in self.ledger.claims():
            found[claim.account] = found.get(claim.account, 0) + claim.charge
        return {account: nbytes for account, nbytes in found.items() if nbytes}


Serve = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def front() -> Serve:
    """``async with front(model, …) as server``: in the end the book must be empty."""

    @asynccontextmanager
    async def serve(
        *models: ModelSpec, devices: Sequence[Any] | None = None, tier: int = GIB, host: int = 64 * GIB, **settings: Any
    ) -> AsyncIterator[Front]:
        devices = [EmulatedDevice("emulated:0", 128 * MIB)] if devices is None else devices
        ledger = Ledger()
        ledger.add_account("host", total=host)
        for device in devices:
            ledger.add_account(device.name, total=device.total())
        plugins = Plugins.load()
        registry = Registry(plugins, ledger, devices, RegistrySettings(host_cache_bytes=tier, **settings))
        registry.apply(models)
        await registry.start()
        service = Service(registry)
        app = create_app(service, ServerConfig(), plugins=plugins)
        try:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
            ) as http:
                yield Front(http, registry, ledger)
        finally:
            await registry.shutdown(20.0)
            service.close()
        assert not ledger.claims()

    return serve


@define
class Card:
    """A pretended CUDA device. ``foreign``: bytes that others hold. Nobody can tell what an engine holds on it."""

    size: int
    foreign: int = 0
    name: str = "cuda:0"
    kind: str = "cuda"
    description: str = "pretended"

    def total(self) -> int:
        return self.size

    def used(self) -> int:
        return self.foreign

    def allocate(self, nbytes: int) -> Any:
        raise TypeError("no emulated device")


# --- the real one ----------------------------------------------------------------------------------


@define
class Real:
    """The SGLang that an interpreter has, on the CPU."""

    python: str
    version: str
    folder: Path

    @property
    def old(self) -> bool:
        return self.version.startswith("0.5.10")

    @property
    def grammar(self) -> bool:
        """Whether what enforces a grammar runs on a CPU."""
        return not self.old

    def model(self, adapter: str = "sglang-generation", **options: Any) -> ModelSpec:
        embeds = adapter == "sglang-embedding"
        shims = [SUPPORT / "shims" / "all"]
        if self.old or embeds:
            shims.append(SUPPORT / "shims" / ("v0510" if self.old else "v0520"))
        env = {"PYTHONPATH": os.pathsep.join(map(str, shims)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        settings: dict[str, Any] = {
            "python": self.python,
            "env": env | ({"SGLANG_USE_CPU_ENGINE": "1"} if embeds else {}),
            "attention_backend": "torch_native",
            "load_format": "dummy",
            "warmup": False,
            "max_total_tokens": 4096,
        }
        if self.old:
            settings["dtype"] = "float32"
            settings |= {"extra_args": ("--grammar-backend", "none")} if embeds else {"grammar_backend": "none"}
        kind = KINDS[adapter].options
        source = Source("path", str(self.saved("qwen2" if embeds else "gpt2")))
        return ModelSpec("real", adapter, source, options=kind(**settings | options))

    def saved(self, kind: str) -> Path:
        """A tiny model with random weights, made by the environment's own transformers."""
        folder = self.folder / kind
        if not folder.exists():
            env = {**os.environ, "PYTHONPATH": str(SUPPORT / "shims" / "all")}
            command = [self.python, str(SUPPORT / "tiny.py"), kind, str(folder)]
            subprocess.run(command, check=True, env=env, capture_output=True)
        return folder


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    python = os.environ.get("SIE_SGLANG_PYTHON")
    if not python:
        pytest.skip("SIE_SGLANG_PYTHON names no interpreter with SGLang")
    ask = "import importlib.metadata as m; print(m.version('sglang'))"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    return Real(python, version, tmp_path_factory.mktemp("models"))


SPARE_BLANKS = ("--constrained-json-disable-any-whitespace",)
"""A model of random weights may never do anything but indent."""


@pytest.fixture(scope="session")
def reported() -> Events:
    return Events()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(real: Real, reported: Events, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    before = os.environ.get("SIE_STATE_DIR")
    os.environ["SIE_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
    try:
        adapter = GenerationAdapter()
        engine = await asyncio.to_thread(
            adapter.load, real.model(tool_call_parser="qwen25", extra_args=SPARE_BLANKS), context(), reported
        )
    finally:
        os.environ.pop("SIE_STATE_DIR")
        if before is not None:
            os.environ["SIE_STATE_DIR"] = before
    yield engine
    await asyncio.to_thread(engine.close, TransitionContext())


@pytest.fixture
def roomy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB, of which 56 are free, whatever this one has."""
    import sie_core

    class Machine:
        def available(self, *, reclaim: bool = True) -> int:
            return 56 << 30

        def total(self) -> int:
            return 64 << 30

        def limit(self) -> int | None:
            return None

    monkeypatch.setattr(sie_core, "HostMemory", Machine)
