"""How much memory may be taken: what the machine has left, or the container, if that is less.

A pool in memory files has no limit of its own: it grows until the kernel kills somebody. So look
first, and refuse with figures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvpool.proto.errors import InternalError

Read = Callable[[str], str | None]
"""The text of a file, or None if there is none that can be read."""

_MEMINFO = "/proc/meminfo"
_OWN_CGROUPS = "/proc/self/cgroup"


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """A figure and where it came from, for texts like "only … bytes available by …"."""

    available_bytes: int
    source: str
    """The file that sets the limit, such as ``memory.max of /sys/fs/cgroup/serving``."""


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where a version of cgroups keeps its memory controller, and how it calls things."""

    mount: str
    limit: str
    usage: str
    cache: str  # the line of memory.stat with page cache that the kernel gives back first


_V2 = _Hierarchy("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Hierarchy(
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def read_file(path: str) -> str | None:
    """The text of a file of ``/proc`` or ``/sys``, or None."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def available_bytes(headroom_bytes: int = 0, read: Read = read_file) -> AvailableMemory:
    """What this process may still take, less the headroom that stays for others; never below 0.

    The least of ``MemAvailable`` and, for the process's own cgroup and each one above it, the limit
    less the usage. Page cache that the kernel would give back counts as available in both: else a
    container that has read one large file looks full.
    Raises `InternalError` where the system tells nothing.
    """
    figures = [*_machine(read), *_cgroups(read)]
    if not figures:
        raise InternalError(f"{_MEMINFO} shows no MemAvailable: is /proc mounted?")
    least = min(figures, key=lambda figure: figure.available_bytes)
    return AvailableMemory(max(0, least.available_bytes - headroom_bytes), least.source)


def _machine(read: Read) -> Iterator[AvailableMemory]:
    available = _field(read(_MEMINFO), "MemAvailable:")
    if available is not None:
        yield AvailableMemory(available * 1024, f"MemAvailable of {_MEMINFO}")


def _cgroups(read: Read) -> Iterator[AvailableMemory]:
    """The room in each cgroup with a limit that this process is in."""
    for line in (read(_OWN_CGROUPS) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _limits(_V2, path, read)
        elif "memory" in controllers.split(","):
            yield from _limits(_V1, path, read)


def _limits(hierarchy: _Hierarchy, path: str, read: Read) -> Iterator[AvailableMemory]:
    """Bottom-up from `path`. In a container its upper folders may not exist: they are passed over,
    and the mount point itself is the container's own cgroup."""
    own = PurePosixPath(hierarchy.mount + path)
    for folder in [own, *own.parents]:
        if not folder.is_relative_to(hierarchy.mount):
            break
        limit = _number(read(f"{folder}/{hierarchy.limit}"))
        usage = _number(read(f"{folder}/{hierarchy.usage}"))
        if limit is not None and usage is not None:
            cache = _field(read(f"{folder}/memory.stat"), hierarchy.cache) or 0
            yield AvailableMemory(limit - usage + cache, f"{hierarchy.limit} of {folder}")


def _number(text: str | None) -> int | None:
    """The number in a file that has nothing else; None for ``max``, which is no limit."""
    text = (text or "").strip()
    return int(text) if text.isdecimal() else None


def _field(text: str | None, name: str) -> int | None:
    """The number behind `name` in a file with a name and a number per line."""
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return _number(words[1])
    return None


def return_freed() -> None:
    """What was freed goes back to the system at once. glibc keeps up to 64 MiB at the end of its
    heap, and all that lies below something that lives: after a start that is a good part of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none
    if trim is not None:
        trim(0)
