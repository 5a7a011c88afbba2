"""The listening socket, taken before anything loads: whoever gets the port has it, and a taken one is known at once."""

from __future__ import annotations

import errno
import socket

from sie_core.cli.errors import CommandError, Exit

__all__ = ["BACKLOG", "DEFAULT_PORT", "base_url", "bind"]

DEFAULT_PORT = 8080
BACKLOG = 2048


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens on ``host``. ``None`` for ``port``: 8080, or a free one where that is taken; 0: a free one.

    Raises CommandError, with exit code 2, for an address that can't be had.
    """
    if port is not None:
        return _listen(host, port)
    try:
        return _listen(host, DEFAULT_PORT)
    except CommandError as error:
        if error.code != "PORT_TAKEN":
            raise
        return _listen(host, 0)


def base_url(sock: socket.socket) -> str:
    """The address that a client on this machine can use, whatever the socket is bound to."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refused(f"the address {host!r} is not known here: {reason}", "choose another with --host") from error
    # "localhost" means both families: IPv4 first, as most clients that are given 127.0.0.1 expect.
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listening at once, because two sockets that are only bound may share a port.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _explained(host, port, error) from error
    sock.setblocking(False)
    return sock


def _explained(host: str, port: int, error: OSError) -> CommandError:
    if error.errno == errno.EADDRINUSE:
        return _refused(
            f"port {port} on {host} is taken",
            "stop what uses it, or choose another with --port (0: any that is free)",
            code="PORT_TAKEN",
        )
    if error.errno == errno.EACCES:
        return _refused(f"this user may not listen on port {port}", "choose one above 1023 with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return _refused(f"this machine does not have the address {host}", "choose another with --host")
    return _refused(f"can't listen on {host}, port {port}: {error.strerror}", "choose others with --host and --port")


def _refused(message: str, hint: str, *, code: str = "CONFIG_ERROR") -> CommandError:
    return CommandError(message, exit_code=Exit.USAGE, code=code, hint=hint)
