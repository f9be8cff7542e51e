"""The folder of one tier: private, locked, of one format, and never somebody else's.

    IDENTITY    version, sizes that cannot change, an id     (JSON, written once)
    LOCK        flock of the daemon that uses the folder
    catalogue   LMDB
    data.0000 … the data files

The folder is 0700 and every file 0600. A symlink, or a file of another user, is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from kvpool.proto.errors import ConfigError

FORMAT = 1
IDENTITY = "IDENTITY"
LOCK = "LOCK"
CATALOGUE = "catalogue"
SCRATCH = "scratch"
"""Written and removed again while the device is measured or checked."""
_NEW = f"{IDENTITY}.new"
_HARMLESS = (LOCK, SCRATCH, _NEW)
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Identity:
    """What a folder was made with, in bytes; it cannot change while there is data in it."""

    file_bytes: int
    segment_bytes: int
    block_bytes: int
    id: str
    format: int = FORMAT


class Folder:
    """An open and locked folder. Raises `ConfigError`, with the way out, for one that cannot be
    used."""

    def __init__(self, path: str, *, create: bool = True) -> None:
        self.path = Path(path)
        if create:
            _make_private(self.path)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"ssd_path {path!r} cannot be opened: {error.strerror}") from error
        try:
            self._check_private()
            if not create and IDENTITY not in self.names():
                raise ConfigError(f"{path} holds no SSD tier of kvpool")
            self._lock = self._locked()
        except BaseException:
            os.close(self._fd)
            raise

    def open(self, name: str, flags: int = 0) -> int:
        """A descriptor of a file in this folder, made if missing. Never follows a symlink.

        Raises `ConfigError` for what is not a plain file of this user, and `OSError`.
        """
        try:
            fd = os.open(name, _OPEN | os.O_CREAT | flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(f"{self.path / name} is a symlink: remove it") from error
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(fd)
            raise ConfigError(f"{self.path / name} is not a plain file of user {os.geteuid()}")
        return fd

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    def sync(self) -> None:
        """Files that were made or removed stay so."""
        os.fsync(self._fd)

    def identity(self) -> Identity | None:
        """None in a fresh folder. Raises `ConfigError` for another version, or for none."""
        if IDENTITY not in self.names():
            strange = [name for name in self.names() if name not in _HARMLESS]
            if strange:
                raise ConfigError(
                    f"{self.path} holds {strange[0]!r} but no {IDENTITY}: it is not a folder of "
                    "kvpool; give ssd_path an empty or a new folder"
                )
            return None
        fd = self.open(IDENTITY)
        with open(fd, "rb") as file:
            raw = file.read()
        try:
            values = json.loads(raw)
            version = values["format"]
            if version != FORMAT:
                raise ConfigError(
                    f"{self.path} has format {version!r}, this version reads {FORMAT}: use the "
                    "version of kvpool that made it, or give ssd_path another folder"
                )
            return Identity(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path / IDENTITY} is damaged: {error}") from error

    def set_identity(self, identity: Identity) -> None:
        """Makes the folder one of kvpool's: all of it or none of it, whenever it is interrupted."""
        fd = self.open(_NEW, os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(json.dumps(asdict(identity)).encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename(_NEW, IDENTITY, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync()

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        held, self._lock, self._fd = (self._lock, self._fd), -1, -1
        for fd in held:
            if fd >= 0:
                os.close(fd)

    def _check_private(self) -> None:
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{self.path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise ConfigError(f"{self.path} is open to others (mode {mode:o}): chmod 700 it")

    def _locked(self) -> int:
        fd = self.open(LOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
            os.close(fd)
            raise ConfigError(
                f"{self.path} is in use by process {owner}: give each daemon a folder of its own"
            ) from error
        os.truncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"ssd_path {str(path)!r} cannot be made: {error.strerror}") from error
