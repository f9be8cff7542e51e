"""What a data worker knows of its domain: the mapped pool, and the shape of each namespace."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.chunk import read_prologue, write_prologue
from kvpool.proto.errors import DeniedError, InvalidError, StaleError
from kvpool.store.caller import Caller
from kvpool.transfer.copying import Bytes

_KEY_IN_HEADER = slice(40, 72)


class PoolMap:
    """The pool of one domain, mapped writable. Grows when the daemon's does. Thread-safe."""

    def __init__(self, daemon: Caller) -> None:
        self._daemon = daemon
        self._lock = threading.Lock()
        self._region_bytes = 0
        self._views: list[Bytes] = []
        self._attach(0)

    def view(self, address: int, nbytes: int) -> Bytes:
        """The bytes of an extent. Raises `StaleError` for an address that no region has."""
        region, offset = divmod(address, self._region_bytes)
        if region >= len(self._views):
            self._attach(region)
        view = self._views[region][offset : offset + nbytes]
        if view.size < nbytes:
            raise StaleError(f"an extent of {nbytes} bytes at {address} leaves its region")
        return view

    def _attach(self, region: int) -> None:
        with self._lock:
            if region < len(self._views):
                return  # another thread was faster
            self._region_bytes, regions = self._daemon.attach(writable=True)
            known = len(self._views)
            for extra in regions[:known]:
                extra.close()
            self._views += [new.view() for new in regions[known:]]
            if region >= len(self._views):
                raise StaleError(f"region {region} does not exist")


@dataclass(frozen=True, slots=True)
class PartShape:
    """One part of a namespace, as far as its extents go. `digest` is the namespace's."""

    digest: bytes
    layout_id: int
    number: int
    planes: int
    nbytes: int
    extent_bytes: int

    @property
    def prologue_bytes(self) -> int:
        return self.extent_bytes - self.nbytes

    def is_header_of(self, extent: Bytes, key: bytes | None) -> bool:
        """Whether `extent` holds this part of chunk `key` (None: of any chunk)."""
        return not isinstance(self._read(extent, key), str)

    def stamp(self, extent: Bytes, key: bytes, generation: int) -> bool:
        """Writes `generation` into a header that a remote writer sent; False if the header is not
        that of this part of chunk `key`."""
        sums = self._read(extent, key)
        if isinstance(sums, str):
            return False
        write_prologue(
            extent,
            namespace=self.digest,
            key=key,
            part=self.number,
            generation=generation,
            nbytes=self.nbytes,
            layout_id=self.layout_id,
            sums=None if sums is None else sums.tolist(),
            planes=self.planes,
        )
        return True

    def _read(self, extent: Bytes, key: bytes | None) -> npt.NDArray[np.uint64] | str | None:
        return read_prologue(
            extent,
            namespace=self.digest,
            key=extent[_KEY_IN_HEADER].tobytes() if key is None else key,
            part=self.number,
            generation=None,
            nbytes=self.nbytes,
            layout_id=self.layout_id,
            planes=self.planes,
        )


class Spaces:
    """The namespaces that clients of this worker use, learned from the daemon. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, int], tuple[PartShape, ...]] = {}

    def parts(self, client: Caller, namespace: int, bitmap: int) -> list[PartShape]:
        """The parts that `bitmap` selects (0: all). Raises `DeniedError` for a namespace that the
        tenant of `client` has not opened, and `InvalidError`."""
        welcome = client.welcome
        name = (welcome.epoch, welcome.tenant, namespace)
        if name not in self._known:
            self._learn(client)
        parts = self._known.get(name)
        if parts is None:
            raise DeniedError(f"namespace {namespace} was not opened by tenant {welcome.tenant!r}")
        if bitmap >> len(parts):
            raise InvalidError(f"part bitmap {bitmap:#x} names more than {len(parts)} parts")
        return [part for part in parts if not bitmap or bitmap >> part.number & 1]

    def _learn(self, client: Caller) -> None:
        report = client.call(wire.Status())
        assert isinstance(report, wire.StatusReport)
        welcome = client.welcome
        for space in json.loads(report.json)["domains"][welcome.domain]["namespaces"]:
            self._known[welcome.epoch, welcome.tenant, space["id"]] = tuple(
                PartShape(
                    digest=bytes.fromhex(space["digest"]),
                    layout_id=int(space["layout_id"], 16),
                    number=number,
                    planes=part["planes"],
                    nbytes=part["nbytes"],
                    extent_bytes=part["extent_bytes"],
                )
                for number, part in enumerate(space["parts"])
            )
