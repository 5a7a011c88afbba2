"""``sie serve``: reads the configuration, builds the server, runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import frozen
from cyclopts import Group, Parameter

from sie_core.cli import logs, settings
from sie_core.cli.app import command
from sie_core.cli.bind import base_url, bind
from sie_core.cli.errors import Exit
from sie_core.cli.output import printable
from sie_core.cli.problems import explained
from sie_core.config import DEFAULT_FILE, Config, OptionInfo, load_config, options
from sie_core.memory._malloc import cap_arenas
from sie_core.plugins import Plugins
from sie_core.types import Capabilities, Residency, Task
from sie_core.units import format_bytes

if TYPE_CHECKING:
    from sie_core.cli.compose import Parts
    from sie_core.cli.running import Listener, Signals

__all__ = ["serve"]

_log = logging.getLogger("sie.cli")
_TITLES = {
    "server": "Server",
    "memory": "Memory",
    "requests": "Requests",
    "compute": "Compute",
    "telemetry": "Logs and metrics",
    "plugins": "Plugins",
}


_USUAL = "http://127.0.0.1:8080"
"""Where the other commands look for a server."""
_DESCRIBED_S = 1.0
"""What the greeting waits for an adapter to say what its model can do."""
_CLOSED = (Residency.UNLOADED, Residency.FAILED)
_METAVARS = {"one of": "WORD", "size": "SIZE", "path": "FILE", "whole number": "N", "a number": "SECONDS"}


@frozen
class _Asked:
    """What the command line asked for: the file, the options by key, and whether to watch the file."""

    file: Path | None
    flags: dict[str, Any]
    reload: bool


def _parsed() -> Callable[..., int]:
    """The function that cyclopts sees: one parameter for each option that may stand on a command line."""

    def run(config: Path | None = None, reload: bool = False, **values: Any) -> int:
        flags = {keys[name]: _text(value) for name, value in values.items() if value is not None}
        return _run(_Asked(config, flags, reload))

    infos = {str(info.flag).lstrip("-").replace("-", "_"): info for info in options() if info.flag}
    keys = {name: info.key for name, info in infos.items()}
    parameters = [_parameter("config", Path | None, None, _FILE), _parameter("reload", bool, False, _RELOAD)]
    parameters += [_of_option(name, info) for name, info in infos.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__ = serve.__doc__
    return run


@command(
    "[OPTIONS]",
    "sie serve",
    "sie serve --config sie.yaml --port 9000 --reload",
    "sie serve --emulate-device 256MiB",
    parsed=_parsed,
)
def serve() -> None:
    """Start the server.

    Without a configuration it serves the models that the installed adapters bring; if that is one, it is loaded right
    away. Models of a configuration are loaded by their first request, pinned ones right away.

    Every option can also stand in the configuration file or in an environment variable; a flag wins over a variable, a
    variable over the file. SIGHUP has the file read again.
    """


_FILE = Parameter(
    name=("--config", "-c"),
    metavar="FILE",
    help=f"Configuration file. Not given: SIE_CONFIG, else {DEFAULT_FILE} here, if there is one.",
)
_RELOAD = Parameter(negative="", show_default=False, help="Read the configuration file again whenever it changes.")


def _parameter(name: str, kind: Any, default: Any, described: Parameter) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, described]
    )


def _of_option(name: str, info: OptionInfo) -> inspect.Parameter:
    # Values stay text: the configuration reads them as strictly as the file's, and names the flag in its errors.
    kind = bool | None if info.type is bool else str | None
    section = info.key.partition(".")[0]
    described = Parameter(
        name=info.flag,
        help=info.help + (f" [{info.env}]" if info.env else ""),
        metavar=_metavar(info),
        show_default=_default(info),
        group=Group(_TITLES[section], sort_key=list(_TITLES).index(section) + 1),
    )
    return _parameter(name, kind, None, described)


def _metavar(info: OptionInfo) -> str | None:
    if info.type is bool:
        return None
    for mark, word in _METAVARS.items():
        if mark in info.expects:
            return word
    return info.key.rpartition("_")[2].rpartition(".")[2].upper()


def _default(info: OptionInfo) -> Any:
    """The default as people write it; False where showing one would say nothing."""
    if info.default in (None, False, (), ""):
        return False
    is_size = "size" in info.expects and isinstance(info.default, int)
    text = format_bytes(info.default) if is_size else str(info.default)
    return lambda _: text


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- running ---------------------------------------------------------------------------------------


def _run(asked: _Asked) -> int:
    # Whoever manages the process may ask for a reload before there is anything to reload.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    cap_arenas()  # before there are threads that have one each
    with explained():
        config = load_config(asked.file, flags=asked.flags)
        logs.set_up(config.telemetry.log_level, config.telemetry.log_file)
        for warning in config.warnings:
            _log.warning("%s", warning)
        sock = bind(config.server.host, config.server.port)
        plugins = Plugins.load(strict=config.plugins.strict)
        config = settings.bind(config, plugins)
    from sie_core.cli.running import leave, loop_factory

    code: int | None = None
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(_serve(asked, config, plugins, sock))
    except RuntimeError:
        if code is None:
            raise
        # Closing the loop starts a thread, which may be refused: a reason more to leave.
        _log.exception("the event loop could not be closed")
        code = Exit.FAILED
    logging.shutdown()
    # Everything is closed. An interpreter full of frameworks takes seconds to clear away, to nobody's good.
    leave(code)


async def _serve(asked: _Asked, config: Config, plugins: Plugins, sock: socket.socket) -> int:
    from sie_core.cli.compose import compose
    from sie_core.cli.reload import Reloader
    from sie_core.cli.running import Listener, Signals, connection_limits, tend_garbage

    signals = Signals(drain_s=config.server.drain_s)
    with signals.handled():
        with explained():
            parts = compose(config, plugins)
            await parts.registry.start()
        reloader = Reloader(config, lambda: settings.read(asked.file, asked.flags, plugins), parts.registry)
        signals.on_hangup = reloader.reload
        watching = asyncio.ensure_future(reloader.watch(config.path)) if asked.reload and config.path else None
        if asked.reload and watching is None:
            _log.warning("--reload: there is no configuration file to watch")
        limits = connection_limits(config.server.max_connections)
        listener = Listener(parts.app, sock, drain_s=config.server.drain_s, limits=limits)
        serving = asyncio.ensure_future(listener.serve())
        tend_garbage()
        _greet(config, sock, await _example(parts))
        preloading = _preload(parts)
        await asyncio.wait({serving, signals.asked}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, preloading):
            if task is not None:
                task.cancel()
        return await _end(parts, listener, serving, signals)


def _preload(parts: Parts) -> asyncio.Task[Any] | None:
    """Load the one model that is served without any configuration: the first request of a newcomer should not wait."""
    models = parts.config.models
    if parts.config.origin("models").kind != "default" or len(models) != 1:
        return None
    task = asyncio.ensure_future(parts.service.load(models[0].name))
    # A failure stands in the log and in the model's state, where the first request finds it.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _end(parts: Parts, listener: Listener, serving: asyncio.Future[None], signals: Signals) -> int:
    """Stop accepting, let the requests end, close the engines; everything within one deadline."""
    deadline = signals.deadline or signals.begin()
    parts.service.begin_shutdown()
    listener.stop()
    # Side by side: requests that wait for a model hold their connections until the registry sends them away.
    closing = parts.registry.shutdown(deadline.left(), drain_s=signals.drain_s)
    for failed in await asyncio.gather(serving, closing, return_exceptions=True):
        if failed is not None:
            _log.error("the end did not go as it should", exc_info=failed)
    parts.service.close()
    parts.telemetry.shutdown()
    stuck = [status.name for status in parts.registry.statuses() if status.residency not in _CLOSED]
    if stuck:
        _log.error("leaving without having closed: %s", ", ".join(stuck))
        return Exit.FAILED
    if not signals.asked.done():
        _log.error("the HTTP server ended by itself")
        return Exit.FAILED
    _log.info("stopped")
    return Exit.OK


async def _example(parts: Parts) -> tuple[str, dict[str, Any]] | None:
    """A path, and the body of a request to it, for the first model whose adapter is there."""
    model = next((model for model in parts.config.models if model.adapter in parts.plugins.adapters), None)
    if model is None:
        return None
    known = Capabilities()
    with contextlib.suppress(TimeoutError):  # its adapter can't tell in a moment
        async with asyncio.timeout(_DESCRIBED_S):
            known = (await parts.registry.describe(model.name)).capabilities or known
    return _request(model.name, known)


def _greet(config: Config, sock: socket.socket, example: tuple[str, dict[str, Any]] | None) -> None:
    text = _greeting(config, sock, example)
    _log.info("ready at %s", base_url(sock))
    with contextlib.suppress(OSError):  # whoever started us need not be interested
        print(text, flush=True)


def _greeting(config: Config, sock: socket.socket, example: tuple[str, dict[str, Any]] | None) -> str:
    url = base_url(sock)
    names = [model.name for model in config.models]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    lines = [f"SIE is ready at {url}", f"  models    {shown or 'none: name some in the configuration'}"]
    if config.path is not None:
        lines.append(f"  from      {config.path}")
    if config.server.port is None and not url.endswith(":8080"):
        lines.append("  port      8080 is taken, so this is a free one; --port chooses another")
    if url != _USUAL:
        lines.append(f"  look      sie ps --url {url} (or set SIE_BASE_URL)")
    if example is not None:
        path, body = example
        key = ' -H "Authorization: Bearer $SIE_API_KEY"' if config.server.api_keys else ""
        lines += [
            "  try       curl " + url + path + key + " -H 'Content-Type: application/json' \\",
            f"              -d '{json.dumps(body)}'",
        ]
    lines.append("  stop      Ctrl-C")
    return printable("\n".join(lines), newlines=True)


def _request(model: str, known: Capabilities) -> tuple[str, dict[str, Any]]:
    """A path, OpenAI's or Cohere's where there is one, and a body for it that the model can answer."""
    if Task.GENERATE in known.tasks:
        return "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "Hello, world"}]}
    if Task.ENCODE in known.tasks and "dense" in known.outputs:
        return "/v1/embeddings", {"model": model, "input": "Hello, world"}
    if Task.SCORE in known.tasks:
        return "/v1/rerank", {"model": model, "query": "Hello, world", "documents": ["Hello", "Goodbye"]}
    items = {"items": [{"text": "Goethe wrote Faust in Weimar"}]}
    if Task.EXTRACT in known.tasks:
        return f"/v1/extract/{model}", items
    return f"/v1/encode/{model}", {**items, "params": {"output_types": [*known.outputs]}}
