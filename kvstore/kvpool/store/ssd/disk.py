"""What the SSD tier asks of the world: data files, and a catalogue of what is in them.

Both have a real implementation (`files`, `lmdb_catalog`) and a simulated one (`simulated`) that
crashes on demand. Every method blocks and is called from worker threads, never from the event loop.

A device that fails raises `OSError`, whatever the cause; nothing here is repaired or retried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvpool.store.ssd.entries import Entry, SpaceRecord
from kvpool.transfer.copying import Bytes

COMMIT_MAX = 256
"""Changes in one commit of a catalogue, so that its reserve has room for a page of each."""


class Disk(Protocol):
    """The data files of one tier as one space: address = file number * file bytes + offset."""

    @property
    def block_bytes(self) -> int:
        """What addresses are multiples of: the unit that the device and the kernel write whole."""

    def read(self, address: int, target: Bytes) -> None:
        """Fills `target`. REQUIRES: within one file, `address` a multiple of the block."""

    def write(self, address: int, source: Bytes) -> None:
        """Writes `source`. It is durable after the next `sync`, and until then may be there in
        any mixture of old and new blocks. REQUIRES: as `read`."""

    def sync(self) -> None:
        """All that was written before the call is durable when this returns."""

    def free_bytes(self) -> int:
        """What the file system has left for anybody."""

    def check(self) -> None:
        """Writes, syncs and reads a block of its own: whether the device works again."""


class Catalogue(Protocol):
    """Which chunk lies where. Survives crashes: a commit is there as a whole, or not at all."""

    def commit(self, puts: Sequence[Entry], deletes: Sequence[bytes]) -> None:
        """Deletes by key, then puts, in one transaction that is durable when this returns.

        REQUIRES: at most `COMMIT_MAX` of both. Raises `CatalogueFullError` with nothing changed if
        there is no room for `puts`; deletes alone always have room.
        """

    def add_space(self, record: SpaceRecord) -> None:
        """Remembers a namespace under its number. Durable when this returns."""

    def spaces(self) -> list[SpaceRecord]:
        """Every namespace that was added."""

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and packed entry. To be used up before the next commit."""

    def figures(self) -> dict[str, int]:
        """Bytes: of the file, and of what is used in it."""

    def close(self) -> None:
        """Idempotent."""


class CatalogueFullError(OSError):
    """No room for more entries; deleting makes room."""


class ShortReadError(OSError):
    """The file ends before what should be in it: damage, not a failing device."""
