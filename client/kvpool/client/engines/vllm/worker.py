"""The worker's side: pulls what a plan loads, publishes what it saves."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby
from time import monotonic

import numpy as np

from kvpool.client import Match, Session
from kvpool.client.engines.vllm.identity import Group, Identity, part_name, plane_name
from kvpool.client.engines.vllm.memory import Memory
from kvpool.client.engines.vllm.plan import Load, Plan, Save
from kvpool.client.engines.vllm.settings import Sessions
from kvpool.proto.errors import KvpoolError
from kvpool.transfer.copying import Bytes

log = logging.getLogger("kvpool.vllm")

DEADLINE_S = 2.0
"""Of one load, and of one publication. Afterwards vLLM computes."""
IDLE_S = 0.03
"""How long a step that computes nothing waits for a load; a request that comes then waits with it.
An engine that asks without a pause keeps the interpreter to itself: each copy of a load then waits
5 ms for its turn. Asking every 5 ms costs a load of 65 MB 4 ms, every 20 one."""
NULL = 0
"""The block that vLLM puts where a sliding window has no use for one."""
STAGED_BYTES = 256 << 20
"""Of chunks that wait to be published; what comes on top is not stored."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which worker this is."""

    stage: int
    shard: int
    publishes: bool
    """False for all but the first of several ranks that hold the same KV."""


class WorkerSide:
    """One worker's work for the store. Called by one thread, works in several of its own."""

    def __init__(self, identity: Identity, sessions: Sessions, rank: Rank, *, waits: bool) -> None:
        """`waits`: a step ends only when what it saves is stored."""
        self._identity = identity
        self._sessions = sessions
        self.rank = rank
        self._waits = waits
        self._memories: Mapping[int, Memory] = {}
        self._loader = ThreadPoolExecutor(2, "kvpool-load")
        self._saver = ThreadPoolExecutor(1, "kvpool-save")
        self._staging = Staging(STAGED_BYTES)
        self._loading: dict[str, Future[set[int]]] = {}
        self._failed: set[int] = set()

    def register(self, memories: Mapping[int, Memory]) -> None:
        """The pages of this worker's layers by group. REQUIRES: before all other calls."""
        self._memories = memories

    # ---- loading

    def load_now(self, plan: Plan) -> None:
        """If a load fails, `plan` saves nothing: its step computes with what is not there."""
        for load in plan.loads:
            self._failed |= self._load(load)
        if self._failed:
            plan.saves.clear()

    def load_meanwhile(self, plan: Plan) -> None:
        for load in plan.loads:
            self._loading[load.request] = self._loader.submit(self._load, load)

    def loaded(self, plan: Plan) -> dict[str, set[int]]:
        """Requests whose loads have ended since the last call, and the blocks that are bad."""
        if plan.idle and self._loading:
            wait(self._loading.values(), IDLE_S, FIRST_COMPLETED)
        done = {name: future for name, future in self._loading.items() if future.done()}
        for name in done:
            del self._loading[name]
        return {name: future.result() for name, future in done.items()}

    def failed_now(self) -> set[int]:
        """Bad blocks of `load_now` since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _load(self, load: Load) -> set[int]:
        """The blocks that did not come."""
        every = {block for blocks in load.blocks for block in blocks if block != NULL}
        end = monotonic() + DEADLINE_S
        try:
            session = self._sessions.of(load.variant)
            names = tuple(self._part(group) for group in self._identity.groups)
            with session.adopt(load.lease, load.keys, parts=names, deadline_s=_left(end)) as match:
                good = min(
                    self._pull(session, match, group, load, blocks, end)
                    for group, blocks in zip(self._identity.groups, load.blocks, strict=True)
                )
        except KvpoolError as error:
            log.warning("request %s is computed: %s", load.request, error)
            return every
        except Exception:
            log.exception("request %s is computed", load.request)
            return every
        if good >= load.last:
            return set()
        log.warning("request %s is computed from token %d on", load.request, max(good, load.first))
        if self._identity.hybrid:
            return every
        (group,) = self._identity.groups
        kept = max(0, good - load.first) // group.block_tokens
        return set(load.blocks[0][kept:])

    def _pull(
        self,
        session: Session,
        match: Match,
        group: Group,
        load: Load,
        blocks: Sequence[int],
        end: float,
    ) -> int:
        """The token up to which everything came by `end` on the monotonic clock."""
        size, memory = self._identity.chunk_tokens, self._memories[group.number]
        layers = range(group.layers[self.rank.stage])
        per_chunk = size // group.block_tokens
        for wanted, run in groupby(_pieces(load, size, group, blocks), key=lambda p: p.positions):
            pieces = list(run)
            planes = [plane_name(layer, at) for layer in layers for at in wanted]
            into = [memory.landing(piece.blocks) for piece in pieces]
            first = pieces[0].chunk
            if match.chunks < first + len(pieces):  # the lease has ended
                return first * size
            pulled = session.pull(
                match,
                into,
                part=self._part(group),
                layers=None if len(wanted) == per_chunk else planes,
                tokens=(first * size, (first + len(pieces)) * size),
                deadline_s=_left(end),
            )
            for piece, pages in zip(pieces[: pulled.chunks], into, strict=False):
                memory.landed(piece.blocks, pages)
            if not pulled.ok:
                log.info("a pull failed: %s", pulled.error or pulled.outcomes.tolist())
                return (first + pulled.chunks) * size
        return load.last

    # ---- saving

    def save(self, plan: Plan) -> None:
        """Copies what `plan` saves, so that its blocks may be used again, and publishes it."""
        if not self.rank.publishes:
            return
        saving = [self._publish(save) for save in plan.saves]
        if self._waits:
            wait([future for futures in saving for future in futures], DEADLINE_S)

    def _publish(self, save: Save) -> list[Future[None]]:
        futures: list[Future[None]] = []
        for group, blocks in zip(self._identity.groups, save.blocks, strict=True):
            per_chunk = self._identity.chunk_tokens // group.block_tokens
            memory = self._memories[group.number]
            nbytes = group.layers[self.rank.stage] * per_chunk * group.page_bytes
            for number in range(len(blocks) // per_chunk):
                mine = blocks[number * per_chunk : (number + 1) * per_chunk]
                if NULL in mine:  # out of a sliding window already
                    continue
                staged = self._staging.take(nbytes)
                if staged is None:
                    log.warning("the store is slow: some chunks are not stored")
                    return futures
                memory.copy_out(mine, staged)
                chunk = save.first + number
                futures.append(self._saver.submit(self._store, save, group, chunk, staged))
        return futures

    def _store(self, save: Save, group: Group, chunk: int, staged: Bytes) -> None:
        try:
            session = self._sessions.of(save.variant)
            done = session.publish(save.keys, [staged], first=chunk, part=self._part(group))
            if not done.stored:
                log.info("chunk %d was not stored: %s", chunk, done.text or done.outcomes.tolist())
        except Exception:
            log.exception("chunk %d was not stored", chunk)
        finally:
            self._staging.give(staged)

    def _part(self, group: Group) -> str:
        return part_name(group.number, self.rank.stage, self.rank.shard)

    def close(self) -> None:
        """Publishes what waits, within the deadline of each, and disconnects."""
        self._loader.shutdown()
        self._saver.shutdown()
        self._sessions.close()


def _left(end: float) -> float:
    """Seconds until `end` on the monotonic clock."""
    return max(0.0, end - monotonic())


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of one chunk, and which of the chunk they are."""

    chunk: int
    positions: tuple[int, ...]
    blocks: tuple[int, ...]


def _pieces(load: Load, size: int, group: Group, blocks: Sequence[int]) -> Iterator[_Piece]:
    """What a load needs of each chunk."""
    per_chunk, start = size // group.block_tokens, load.first // group.block_tokens
    table = list(enumerate(blocks, start))
    for chunk, run in groupby(table, key=lambda at: at[0] // per_chunk):
        mine = [(at % per_chunk, block) for at, block in run if block != NULL]
        if mine:
            yield _Piece(chunk, tuple(at for at, _ in mine), tuple(block for _, block in mine))


class Staging:
    """Buffers for copies of chunks. They are kept: fresh memory costs as much as the copy."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes | None:
        """None if as much as is allowed is in use."""
        for number, buffer in enumerate(self._free):
            if buffer.size == nbytes:
                return self._free.pop(number)
        if nbytes > self._left:
            return None
        self._left -= nbytes
        return np.empty(nbytes, np.uint8)

    def give(self, buffer: Bytes) -> None:
        self._free.append(buffer)
