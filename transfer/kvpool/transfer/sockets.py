"""Addresses, dialling and listening: `unix:PATH` and `tcp://HOST:PORT`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from kvpool.proto.errors import DeadlineError, InvalidError, UnreachableError

BACKLOG = 128
"""Connections that wait to be accepted."""

UNIX_PATH_MAX = 107
"""Bytes in the path of a Unix socket; the kernel's structure has no room for more."""

LISTEN_DEADLINE_S = 5.0
"""Seconds to wait for another process that is just now taking an address in the same folder."""


class TcpAddress(NamedTuple):
    """Host (name or number, IPv6 without brackets) and port."""

    host: str
    port: int


class UnixAddress(NamedTuple):
    """Path of a Unix socket."""

    path: str


def parse(address: str) -> TcpAddress | UnixAddress:
    """Raises `InvalidError`, naming the accepted forms."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path or len(os.fsencode(path)) > UNIX_PATH_MAX:
            raise InvalidError(f"a socket path has 1 to {UNIX_PATH_MAX} bytes: {path!r}")
        return UnixAddress(path)
    if address.startswith("tcp://"):
        host, colon, port = address.removeprefix("tcp://").rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host_ok = bool(host) and (bracketed or ":" not in host)
        if colon and host_ok and port.isascii() and port.isdigit() and int(port) < 65536:
            return TcpAddress(host[1:-1] if bracketed else host, int(port))
    raise InvalidError(
        f"{address!r} is no address: use unix:PATH, tcp://HOST:PORT or tcp://[IPV6]:PORT"
    )


def connect(address: str, deadline: float) -> socket.socket:
    """A connected socket, within `deadline` seconds; tries each address that a name has.

    Raises `InvalidError`, `DeadlineError` and `UnreachableError`.
    """
    end = time.monotonic() + deadline
    reasons = []
    for family, target in _targets(parse(address), address, deadline):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _connect(sock, target, end - time.monotonic())
            return sock
        except TimeoutError:
            sock.close()
            raise DeadlineError(f"{address} did not answer within {deadline} s") from None
        except OSError as error:
            sock.close()
            reasons.append(str(error))
    raise UnreachableError(f"cannot reach {address}: {'; '.join(reasons)}")


def listen(address: str) -> socket.socket:
    """A blocking listener; port 0 lets the system choose one.

    A Unix socket gets mode 0600 and replaces the file of a dead listener. Fork children do not
    inherit it: with one of them left, the address would look alive for ever. Raises `InvalidError`
    if a live listener (or a file that is no socket) is there, and `UnreachableError` if the system
    refuses.
    """
    target = parse(address)
    try:
        if isinstance(target, UnixAddress):
            listener = _listen_unix(target.path)
        else:
            listener = _listen_tcp(target, address)
        _of_this_process.add(listener)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidError(f"somebody listens on {address} already") from error
        raise UnreachableError(f"cannot listen on {address}: {error}") from error


def close_listener(listener: socket.socket) -> None:
    """Close it, and remove its socket file unless somebody else listens there by now."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    listener.close()
    if path:
        # A successor may listen there by now, or the folder be gone: nothing to remove then.
        with contextlib.suppress(InvalidError, OSError), _folder_locked(path):
            _remove_dead(path)


def address_of(listener: socket.socket) -> str:
    """The address to dial for `listener`, with the port that the system chose."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"tcp://{host}:{name[1]}"


def _targets(
    target: TcpAddress | UnixAddress, address: str, deadline: float
) -> list[tuple[int, str | tuple[str, int]]]:
    if isinstance(target, UnixAddress):
        return [(socket.AF_UNIX, target.path)]
    return [(family, (host, port)) for family, host, port in _resolve(target, address, deadline)]


def _resolve(target: TcpAddress, address: str, deadline: float) -> list[tuple[int, str, int]]:
    """Family, number and port of each address of a host.

    The system's resolver knows no deadline, so names are looked up in a thread that is left
    behind when it is late.
    """
    answers: list[tuple[int, str, int]] = []
    reasons: list[str] = []

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            answers.extend((info[0], str(info[4][0]), target.port) for info in found)
        except OSError as error:
            reasons.append(str(error))

    if _is_number(target.host):
        look_up()
    else:
        thread = threading.Thread(target=look_up, name="kvpool-resolve", daemon=True)
        thread.start()
        thread.join(max(deadline, 0))
        if thread.is_alive():
            raise DeadlineError(f"the name in {address} was not resolved within {deadline} s")
    if reasons:
        raise UnreachableError(f"cannot resolve {address}: {reasons[0]}")
    return answers


def _is_number(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def _connect(sock: socket.socket, target: str | tuple[str, int], seconds: float) -> None:
    if seconds <= 0:
        raise TimeoutError
    sock.settimeout(seconds)
    sock.connect(target)


def _listen_tcp(target: TcpAddress, address: str) -> socket.socket:
    family, host, port = _resolve(target, address, LISTEN_DEADLINE_S)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # On Linux this passes over connections in TIME_WAIT, never over a live listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _folder_locked(path):
            _remove_dead(path)
            listener.bind(path)
            # Nobody can connect before `listen`, so there is no instant with a wider mode.
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _folder_locked(path: str) -> Iterator[None]:
    """Between finding a socket dead and replacing it, nobody else may do the same.

    The lock is on the folder itself: it needs no file of its own that would stay behind.
    """
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + LISTEN_DEADLINE_S
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(folder)


def _remove_dead(path: str) -> None:
    """Remove the socket file at `path` if nobody listens. Raises `InvalidError` otherwise,
    unless there is no file at all."""
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidError(f"{path} exists and is no socket; it is left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Not blocking: a live listener with a full backlog answers EAGAIN, which is no refusal.
        probe.setblocking(False)
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)
            return
    raise InvalidError(f"somebody listens on unix:{path} already")


_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for listener in _of_this_process:
        listener.close()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_close_in_child)
