"""The catalogue in LMDB: one file, one environment, used by one thread at a time.

LMDB writes each commit to fresh pages and switches over at its end, so a crash leaves the last
commit whole; it is opened with full synchronisation. Its map has a fixed size. Puts stop when all
but a reserve of the pages is in use, because a deletion needs fresh pages, too: a full map can
always delete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from kvpool.proto.errors import ConfigError
from kvpool.store.ssd.disk import COMMIT_MAX, CatalogueFullError
from kvpool.store.ssd.entries import Entry, SpaceRecord
from kvpool.store.ssd.folder import CATALOGUE, Folder

if TYPE_CHECKING:
    import lmdb

ENTRY_BYTES = 320
"""Room in the map per chunk: some 120 bytes in half-full pages, and the reserve."""
MAP_BYTES_MIN = 16 << 20
READ_AHEAD_BYTES = 128 << 10
"""At a time: of more than its read-ahead (this is the usual one) the kernel takes only so much."""
_RESERVE_SHARE = 4
_RESERVE_PAGES_MIN = 4 * COMMIT_MAX
"""A commit may copy a page for each of its changes, and what it frees can be used two commits
later."""


def map_bytes_for(chunks: int) -> int:
    """Size of a map for `chunks` entries; address space, not memory."""
    return MAP_BYTES_MIN + chunks * ENTRY_BYTES // 4096 * 4096


class LmdbCatalogue:
    """The catalogue of an open folder. Errors of LMDB are raised as `OSError`."""

    def __init__(self, folder: Folder, map_bytes: int) -> None:
        """Raises `ConfigError` if LMDB is not installed or the file is damaged."""
        self._lmdb = _installed()
        os.close(folder.open(CATALOGUE))  # refuses symlinks, and what belongs to others
        self._path = folder.path / CATALOGUE
        try:
            # A map smaller than the file is ignored by LMDB: never offer one.
            self._env: lmdb.Environment | None = self._lmdb.open(
                str(self._path),
                map_size=max(map_bytes, os.stat(self._path).st_size),
                subdir=False,
                max_dbs=2,
                mode=0o600,
                lock=False,  # the folder is locked, and one thread uses this
                readahead=False,
                max_spare_txns=1,
            )
            self._entries = self._env.open_db(b"entries")
            self._spaces = self._env.open_db(b"namespaces")
        except self._lmdb.Error as error:
            raise ConfigError(
                f"{self._path} cannot be used: {error}; remove the folder to start empty"
            ) from error

    def commit(self, puts: Sequence[Entry], deletes: Sequence[bytes]) -> None:
        try:
            with self._open.begin(write=True) as txn:
                if puts and self._used_pages(txn) > self._pages_max:
                    raise CatalogueFullError(f"the catalogue's map of {self._map_bytes} is full")
                for key in deletes:
                    txn.delete(key, db=self._entries)
                for entry in puts:
                    txn.put(entry.key, entry.pack(), db=self._entries)
        except self._lmdb.MapFullError as error:
            raise CatalogueFullError(str(error)) from error
        except self._lmdb.Error as error:
            raise OSError(f"catalogue: {error}") from error

    def add_space(self, record: SpaceRecord) -> None:
        try:
            with self._open.begin(write=True) as txn:
                txn.put(record.number.to_bytes(4, "big"), record.pack(), db=self._spaces)
        except self._lmdb.Error as error:
            raise OSError(f"catalogue: {error}") from error

    def spaces(self) -> list[SpaceRecord]:
        with self._open.begin() as txn, txn.cursor(self._spaces) as cursor:
            return [SpaceRecord.unpack(int.from_bytes(key, "big"), value) for key, value in cursor]

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        self._read_ahead()
        with self._open.begin() as txn, txn.cursor(self._entries) as cursor:
            yield from cursor

    def _read_ahead(self) -> None:
        """Asks for the whole file, which is in no order: page by page it would take seconds."""
        with open(self._path, "rb") as file:
            for at in range(0, os.fstat(file.fileno()).st_size, READ_AHEAD_BYTES):
                os.posix_fadvise(file.fileno(), at, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def figures(self) -> dict[str, int]:
        with self._open.begin() as txn:
            used = self._used_pages(txn) * self._page_bytes
            entries = txn.stat(self._entries)["entries"]
        size = os.stat(self._path).st_size
        return {
            "entries": entries,
            "used_bytes": used,
            "file_bytes": size,
            "map_bytes": self._map_bytes,
        }

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    @property
    def _open(self) -> lmdb.Environment:
        if self._env is None:
            raise OSError("the catalogue is closed")
        return self._env

    @property
    def _map_bytes(self) -> int:
        return int(self._open.info()["map_size"])

    @property
    def _page_bytes(self) -> int:
        return int(self._open.stat()["psize"])

    @property
    def _pages_max(self) -> int:
        """In use, beyond which nothing is put: the rest is for deleting."""
        pages = self._map_bytes // self._page_bytes
        return pages - max(_RESERVE_PAGES_MIN, pages // _RESERVE_SHARE)

    def _used_pages(self, txn: lmdb.Transaction) -> int:
        """Pages of live data; what commits have freed is used again."""
        stats = (txn.stat(self._entries), txn.stat(self._spaces))
        return sum(
            stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats
        )


def _installed() -> ModuleType:
    try:
        import lmdb
    except ImportError as error:
        raise ConfigError(
            "ssd_path needs LMDB, which is not installed: pip install 'kvpool[ssd]'"
        ) from error
    return lmdb
