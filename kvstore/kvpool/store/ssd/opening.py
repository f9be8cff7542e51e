"""A folder becomes a tier's disk and catalogue: made, checked against its identity, or refused."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvpool.proto.errors import ConfigError
from kvpool.store.allocator import segment_size
from kvpool.store.ssd.files import Files, data_name
from kvpool.store.ssd.folder import Folder, Identity
from kvpool.store.ssd.lmdb_catalogue import LmdbCatalogue, map_bytes_for
from kvpool.store.ssd.probe import Access, measure

FILE_BYTES_MAX = 4 << 30
SEGMENT_BYTES = 64 << 20
CAPACITY_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class Opened:
    """Everything that is behind a tier. `close` it when no work is in progress."""

    folder: Folder
    identity: Identity
    access: Access
    files: Files
    count: int
    """Of data files."""
    catalogue: LmdbCatalogue

    @property
    def capacity_bytes(self) -> int:
        return self.count * self.identity.file_bytes

    def close(self) -> None:
        """Idempotent."""
        self.catalogue.close()
        self.files.close()
        self.folder.close()


def open_folder(path: str, capacity: int, chunks: int) -> Opened:
    """The tier of `capacity` bytes in `path`, for at most `chunks` entries; made if missing.

    Reserves all of its space. Raises `ConfigError`, which names the value and the way out.
    """
    if capacity < CAPACITY_MIN:
        raise ConfigError(f"ssd_capacity {capacity} is below the minimum of {CAPACITY_MIN}")
    folder = Folder(path)
    try:
        access = measure(folder)
        identity = folder.identity()
        fresh = identity is None
        if identity is None:
            identity = _new_identity(capacity, access.block_bytes)
        elif capacity < identity.file_bytes:
            raise ConfigError(
                f"ssd_capacity {capacity} is less than one of the files in {path}, which have "
                f"{identity.file_bytes} bytes: raise it, or give ssd_path another folder"
            )
        elif identity.block_bytes % access.block_bytes:
            raise ConfigError(
                f"{path} was made for blocks of {identity.block_bytes} bytes, this device has "
                f"{access.block_bytes}: give ssd_path another folder"
            )
        count = capacity // identity.file_bytes
        _check_space(folder, identity, count)
        if fresh:
            folder.set_identity(identity)
        files = Files(
            folder, count, identity.file_bytes, identity.block_bytes, direct=access.direct
        )
        try:
            catalogue = LmdbCatalogue(folder, map_bytes_for(chunks))
            _remove_more_than(folder, count)
        except BaseException:
            files.close()
            raise
        return Opened(folder, identity, access, files, count, catalogue)
    except OSError as error:
        folder.close()
        raise ConfigError(f"ssd_path {path!r} cannot be used: {error}") from error
    except BaseException:
        folder.close()
        raise


def _new_identity(capacity: int, block: int) -> Identity:
    count = -(-capacity // FILE_BYTES_MAX)
    segment = segment_size(capacity // count, min(SEGMENT_BYTES, capacity // 8))
    segment = segment // block * block
    file_bytes = capacity // count // segment * segment
    return Identity(file_bytes, segment, block, os.urandom(16).hex())


def _check_space(folder: Folder, identity: Identity, count: int) -> None:
    """Before anything is taken: what the files lack must be there."""
    names = folder.names()
    lacking = 0
    for number in range(count):
        if data_name(number) in names:
            have = os.stat(folder.path / data_name(number), follow_symlinks=False).st_blocks * 512
            lacking += max(0, identity.file_bytes - have)
        else:
            lacking += identity.file_bytes
    free = folder.free_bytes()
    if lacking > free:
        raise ConfigError(
            f"{folder.path}: ssd_capacity needs {lacking} more bytes, but its file system has only "
            f"{free} left: lower ssd_capacity, or free space"
        )


def _remove_more_than(folder: Folder, count: int) -> None:
    """The capacity was lowered: what was in these files is not claimed any more."""
    keep = {data_name(number) for number in range(count)}
    for name in folder.names():
        if name.startswith("data.") and name not in keep:
            folder.remove(name)
