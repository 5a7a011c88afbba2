"""The life of the server process: signals, uvicorn, and an end that comes within a deadline."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn

import psutil
import uvicorn
from attrs import define, field

from sie_core.cli.bind import BACKLOG
from sie_core.http.door import ConnectionLimits
from sie_core.http.protocols import ProtocolName, protocol_factory

__all__ = ["Deadline", "Listener", "Signals", "connection_limits", "leave", "loop_factory", "tend_garbage"]

_log = logging.getLogger("sie.cli")

_CLOSING_S = 15.0
"""Seconds that closing the engines may take after the requests had theirs."""
_ENDING = (signal.SIGTERM, signal.SIGINT)
_LAST_ANSWERS_S = 5.0
"""Seconds for the answers to requests whose engine was taken from them at the end of their time."""
_SPARE_FILES = 128
"""Files that are not for connections: models, logs, engines that are still to come."""
_FEWEST = 8
_KEPT = 16
"""Connections that are kept for loopback and health checks."""
_GOODBYE_S = 0.5
_WS_BYTES = 64 * 1024
"""Largest message of a WebSocket; those of clients say nothing that anybody reads."""
_KEEP_ALIVE_S = 75
"""Longer than the idle time of the clients' own connection pools, so that they close a connection and not we."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def tend_garbage() -> None:
    """Look for reference cycles less often, and never among what is there now and stays.

    Requests leave no cycles behind; looking for some after every 700 objects costs an eighth of the time of each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@define(eq=False)
class Signals:
    """SIGTERM and SIGINT ask for the end, a second one forces it; SIGHUP has the configuration read again."""

    drain_s: float
    asked: asyncio.Future[None] = field(factory=lambda: asyncio.get_running_loop().create_future())
    """Done once the end was asked for."""
    deadline: Deadline | None = None
    on_hangup: Callable[[], Awaitable[None]] | None = None
    _tasks: set[asyncio.Task[None]] = field(factory=set)
    _watchdog: Watchdog = field(factory=lambda: Watchdog())

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Answer the signals while the block runs."""
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, self.ask, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        try:
            yield
        finally:
            # What comes from now on must not bring back the tracebacks of an interrupted interpreter.
            for number in (signal.SIGHUP,) if self.asked.done() else (signal.SIGHUP, *_ENDING):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def ask(self, number: int) -> None:
        """Begin the end."""
        _log.info("%s: stopping (send it again, or press Ctrl-C, to force quit)", signal.Signals(number).name)
        loop = asyncio.get_running_loop()
        for ending in _ENDING:
            # The loop's own handlers would wait their turn behind a hook that blocks the loop.
            loop.remove_signal_handler(ending)
            signal.signal(ending, self._again)
        self.begin()
        self.asked.set_result(None)

    def _again(self, number: int, frame: object) -> None:
        leave(1, f"sie: {signal.Signals(number).name} again: leaving at once")

    def begin(self) -> Deadline:
        """From now on the time runs."""
        self.deadline = Deadline(self.drain_s + _CLOSING_S, self._watchdog)
        return self.deadline

    def _hang_up(self) -> None:
        if self.on_hangup is None or self.asked.done():
            return
        task = asyncio.ensure_future(self.on_hangup())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Deadline:
    """From its making on, the process has so many seconds to live, whatever then hangs."""

    def __init__(self, seconds: float, watchdog: Watchdog) -> None:
        self._end = time.monotonic() + seconds
        watchdog.watch(seconds)

    def left(self) -> float:
        """Seconds left, less one that stays for saying goodbye."""
        return max(self._end - time.monotonic() - 1.0, 0.0)


class Watchdog:
    """Ends the process when its time is over. Its thread starts early: at the end there may be no room for one."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._seconds = 0.0
        threading.Thread(target=self._run, name="sie-watchdog", daemon=True).start()

    def watch(self, seconds: float) -> None:
        """From now on the time runs."""
        self._seconds = seconds
        self._asked.set()

    def _run(self) -> None:
        self._asked.wait()
        time.sleep(self._seconds)
        leave(1, f"sie: the shutdown did not end within {self._seconds:.0f} s; leaving at once")


def leave(code: int, message: str = "") -> NoReturn:
    """End the process now. Nothing that hangs can hold it, a full pipe behind stdout or stderr neither."""
    said = _thread.allocate_lock()

    def say() -> None:
        with contextlib.suppress(Exception):
            if message:
                print(message, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        said.release()

    # Where memory or threads are used up, none starts, or it ends at once: threading.Thread would wait for it.
    with contextlib.suppress(RuntimeError, MemoryError):
        said.acquire()
        _thread.start_new_thread(say, ())
        said.acquire(timeout=_GOODBYE_S)
    os._exit(code)


def connection_limits(most: int) -> ConnectionLimits:
    """How many connections there may be: ``most``, or as many as the limit of open files leaves room for.

    That limit is raised as far as this user may. Each connection may need a second file, to an engine's process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    fitting = most
    if soft != resource.RLIM_INFINITY:
        fitting = max((soft - psutil.Process().num_fds() - min(soft // 4, _SPARE_FILES)) // 2, _FEWEST)
    if fitting < most:
        _log.warning(
            "the limit of open files, %d, leaves room for %d connections, not for %d (server.max_connections): raise "
            "it with `ulimit -n`, LimitNOFILE= in systemd or --ulimit nofile= in Docker",
            soft,
            fitting,
            most,
        )
    most = min(most, fitting)
    return ConnectionLimits(most=most, kept=min(_KEPT, most // 4))


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling: :class:`Signals` does that."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


class Listener:
    """Answers HTTP on a socket."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        drain_s: float,
        limits: ConnectionLimits | None = None,
        protocol: ProtocolName = "auto",
    ) -> None:
        """``drain_s``: seconds that running requests have once it stops; connections that outlast it are cut."""
        self._sock = sock
        http: Any = protocol_factory(limits or ConnectionLimits(), protocol)
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=http,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                ws="websockets-sansio",
                ws_max_size=_WS_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_s + _LAST_ANSWERS_S),
                backlog=BACKLOG,
            )
        )

    @property
    def started(self) -> bool:
        """Whether it takes connections."""
        return self._server.started

    async def serve(self) -> None:
        """Run until :meth:`stop`, and until the requests that then run have ended."""
        await self._server.serve(sockets=[self._sock])

    def stop(self) -> None:
        """Take no more connections."""
        self._server.should_exit = True
