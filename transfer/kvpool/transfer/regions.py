"""The owner's table of registered memory: ids, generations, and who is using what just now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvpool.proto.errors import InvalidError
from kvpool.transfer.base import Buffer, Item, Region, Status, check_item
from kvpool.transfer.copying import Bytes, as_bytes


class RegionTable:
    """Registered buffers. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._regions: dict[int, tuple[Region, Bytes, bool]] = {}
        self._generations: dict[int, int] = {}
        self._users: dict[Region, int] = {}

    def register(self, buffer: Buffer) -> Region:
        """Memory that is read-only can be read by peers, not written.

        Raises `InvalidError` for a buffer without contiguous bytes.
        """
        view = as_bytes(buffer)
        try:
            view, writable = as_bytes(buffer, writable=True), True
        except InvalidError:
            writable = False
        with self._changed:
            id = next(id for id in range(len(self._regions) + 1) if id not in self._regions)
            generation = self._generations.get(id, 0) + 1
            region = Region(id, generation, view.size)
            self._regions[id] = (region, view, writable)
            self._generations[id] = generation
        return region

    def deregister(self, region: Region) -> None:
        """Refuse `region` from now on, and wait until nobody uses its memory any more.

        Raises `InvalidError` if it does not exist.
        """
        with self._changed:
            known = self._regions.get(region.id)
            if known is None or known[0] != region:
                raise InvalidError(f"{region} does not exist")
            del self._regions[region.id]
            self._changed.wait_for(lambda: region not in self._users)

    @contextlib.contextmanager
    def using(self, item: Item, local_nbytes: int, write: bool) -> Iterator[tuple[Status, Bytes]]:
        """The verdict on `item` and its memory (empty unless `Status.OK`), which stays registered
        while the context lasts."""
        with self._changed:
            region, view, writable = self._regions.get(item.region, (None, _NOTHING, True))
            status = check_item(item, region, local_nbytes)
            if status is Status.OK and write and not writable:
                status = Status.DENIED
            if status is not Status.OK or region is None:
                region, view = None, _NOTHING
            else:
                self._users[region] = self._users.get(region, 0) + 1
        try:
            yield status, view[item.offset : item.offset + item.nbytes] if region else view
        finally:
            if region is not None:
                self._release(region)

    def _release(self, region: Region) -> None:
        with self._changed:
            self._users[region] -= 1
            if not self._users[region]:
                del self._users[region]
                self._changed.notify_all()


_NOTHING = as_bytes(b"")
