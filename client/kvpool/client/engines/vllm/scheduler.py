"""The scheduler's side: matches requests against the store and plans what workers load and save.

It never waits for the store: lookups and hints run in a thread of their own, and vLLM asks again
about a request whose lookup has not ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from kvpool.client import Extra, Match, Session
from kvpool.client.engines.vllm.identity import Identity, Variant, extras_of, variant_of
from kvpool.client.engines.vllm.plan import Load, Plan, Save, Tables
from kvpool.client.engines.vllm.settings import Sessions
from kvpool.proto.errors import ConfigError, InvalidError, KvpoolError
from kvpool.proto.keys import KEY_BYTES

log = logging.getLogger("kvpool.vllm")

DEADLINE_S = 0.5
"""Of one lookup. Afterwards the request is computed, and after the client's pause the next asks."""
PATIENCE_S = 0.002
"""A lookup that ends within this time costs no further round of scheduling. A round that schedules
nothing waits as long for the lookups that it needs: an engine that asks without a pause would keep
the interpreter from them."""
LEASE_S_MIN = 5.0
"""A lease that ends sooner is not worth a load: the request is looked up again."""
HINTS = frozenset({"will_continue", "gap_s", "ttl_s", "ended", "stop_reason", "priority"})


Found = tuple[Session | None, Match | None]
"""What a lookup gave; nothing if the store refuses this engine."""


@dataclass(slots=True)
class Tracked:
    """A request that vLLM has not finished."""

    request: Any
    variant: Variant
    extras: list[Extra]
    lookup: Future[Found] | None = None
    """Until its result was seen."""
    looked_up: bool = False
    session: Session | None = None
    match: Match | None = None
    """The request's one lease, until its prompt is computed."""
    computed: int = 0
    """Tokens that vLLM had itself when it asked last."""
    published: int = 0
    """Leading chunks that are in the store, or on their way there."""
    loading: frozenset[int] = frozenset()
    """Blocks that the store's KV goes to, while the lease is held."""
    alone: bool = False
    """Its KV did not come: the store is not asked again."""


class SchedulerSide:
    """One engine's work for the store on the scheduler's side. Called by one thread."""

    def __init__(
        self, identity: Identity, sessions: Sessions, *, asynchronous: bool, saves: bool
    ) -> None:
        self._identity = identity
        self._sessions = sessions
        self._asynchronous = asynchronous or identity.hybrid
        self._saves = saves
        self._thread = ThreadPoolExecutor(1, "kvpool-lookup")
        self._last: Future[Found] | None = None
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []

    # ---- matching

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond `computed`, and whether that happens meanwhile. None:
        ask again."""
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        tracked.computed = computed
        if tracked.alone:
            return 0, False
        if not self._look_up(tracked):
            return None, False
        if tracked.match is None:
            return 0, False
        usable = tracked.match.usable_prefix(request.num_tokens, self._identity.block_tokens)
        external = max(0, usable - computed)
        return external, bool(external) and self._asynchronous

    def _track(self, request: Any) -> Tracked | None:
        """None for a request without an identity."""
        known = self._tracked.get(request.request_id)
        if known is None:
            try:
                known = Tracked(request, variant_of(request), extras_of(request))
            except (ConfigError, OSError) as error:
                log.warning("request %s is not shared: %s", request.request_id, error)
                return None
            self._tracked[request.request_id] = known
        return known

    def _look_up(self, tracked: Tracked) -> bool:
        """Whether it is known what the store has. A lease is kept from one attempt of vLLM to
        schedule the request to the next; it is looked up anew only when it ends."""
        match = tracked.match
        if match is not None and match.chunks and match.seconds_left < LEASE_S_MIN:
            self._let_go(tracked)
        if tracked.looked_up:
            return True
        if tracked.lookup is None:
            busy = self._last is not None and not self._last.done()
            tracked.lookup = self._last = self._thread.submit(self._find, tracked)
            if not busy:
                wait_for((tracked.lookup,), PATIENCE_S)
        if not tracked.lookup.done():
            return False
        tracked.session, tracked.match = tracked.lookup.result()
        tracked.lookup, tracked.looked_up = None, True
        if tracked.match is not None:
            tracked.published = tracked.match.chunks
        return True

    def _find(self, tracked: Tracked) -> Found:
        try:
            session = self._sessions.of(tracked.variant)
            tokens = list(tracked.request.all_token_ids)
            if self._identity.hybrid:  # the match must end where the load does: windows lie there
                tokens = tokens[:-1]
            match = session.match(tokens, extras=tracked.extras)
        except KvpoolError as error:
            log.warning("the store refuses this engine: %s", error)
            return None, None
        if match.error:  # this request goes on alone; the next one asks again
            log.info("request %s goes on alone: %s", tracked.request.request_id, match.error)
            return None, None
        return session, match

    @staticmethod
    def _let_go(tracked: Tracked) -> None:
        """Of the lease. If vLLM asks again, as after a preemption, there will be a new one."""
        if tracked.match is not None:
            tracked.match.release()
        tracked.match, tracked.looked_up, tracked.loading = None, False, frozenset()

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], external: int) -> None:
        """vLLM has `blocks` for the request, by group; `external` tokens are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if not external or tracked is None or tracked.match is None:
            return
        match = tracked.match
        first, last = tracked.computed, tracked.computed + external
        tables = self._cut(blocks, first, last)
        tracked.loading = frozenset(block for table in tables for block in table)
        self._loads.append(
            Load(
                request.request_id,
                tracked.variant,
                match.lease,
                match.keys[: match.chunks * KEY_BYTES],
                first,
                last,
                tables,
            )
        )

    def failed(self, blocks: Set[int], requests: Set[str]) -> None:
        """KV did not come to these `blocks`, or for these `requests`. Such a request is computed,
        whatever the store promises next, and what it computes is stored: vLLM would ask, load and
        fail for as long as the store says that it has the KV."""
        if not blocks and not requests:
            return
        for name, tracked in self._tracked.items():
            if name in requests or not tracked.loading.isdisjoint(blocks):
                self._let_go(tracked)
                tracked.alone, tracked.published = True, 0

    # ---- planning

    def plan(self, output: Any) -> Plan:
        """For the step that vLLM's `SchedulerOutput` describes."""
        plan = Plan(self._loads, idle=not output.num_scheduled_tokens)
        self._loads = []
        if plan.idle and not plan.loads:
            self._rest()
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is None or tracked.session is None:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            save = self._save(tracked, scheduled - drafts, output.kv_connector_block_state)
            if save is not None:
                plan.saves.append(save)
            if tracked.request.num_output_tokens:  # what was loaded has been used
                self._let_go(tracked)
        return plan

    def _rest(self) -> None:
        lookups = [t.lookup for t in self._tracked.values() if t.lookup is not None]
        if lookups:
            wait_for(lookups, PATIENCE_S, FIRST_COMPLETED)

    def _save(self, tracked: Tracked, scheduled: int, tables: Any) -> Save | None:
        """The chunks that this step completes and nobody has stored, if there are any."""
        request, size = tracked.request, self._identity.chunk_tokens
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        first, last = tracked.published, tokens // size
        if not self._saves or last <= first:
            return None
        assert tracked.session is not None
        keys = tracked.session.keys(list(request.all_token_ids[: last * size]), tracked.extras)
        last = len(keys) // KEY_BYTES  # fewer where something has no identity
        if last <= first:
            return None
        tracked.published = last
        blocks = self._cut(tables.get_block_ids(request.request_id), first * size, last * size)
        return Save(tracked.variant, keys, first, blocks)

    def _cut(self, blocks: Sequence[Sequence[int]], first: int, last: int) -> Tables:
        """The blocks of tokens [first, last), group by group."""
        return tuple(
            tuple(blocks[g.number][first // g.block_tokens : last // g.block_tokens])
            for g in self._identity.groups
        )

    # ---- the end

    def finished(self, request: Any) -> None:
        """Lets go of the lease and tells the store what is known of the request's future."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._let_go(tracked)
        if tracked.session is not None and tracked.published:
            self._thread.submit(self._hint, tracked.session, tracked)

    def _hint(self, session: Session, tracked: Tracked) -> None:
        request = tracked.request
        given = (request.kv_transfer_params or {}).get("kvpool", {})
        told = {"stop_reason": _stop_reason(request), **{k: given[k] for k in HINTS & set(given)}}
        try:
            session.hint(list(request.all_token_ids), extras=tracked.extras, **told)
        except (InvalidError, TypeError, ValueError) as error:
            log.warning("kv_transfer_params %s of %s: %s", given, request.request_id, error)

    def clear(self) -> bool:
        """Deletes all KV of this engine's namespaces, as after an update of the weights."""
        try:
            for session in self._sessions.all():
                session.clear()
        except KvpoolError as error:
            log.warning("the store was not cleared: %s", error)
            return False
        return True

    def close(self) -> None:
        self._thread.shutdown()
        self._sessions.close()


def _stop_reason(request: Any) -> str:
    """Why the answer ended: vLLM's reason, or the stop string or token if there was one."""
    return str(request.stop_reason or request.get_finished_reason() or "")
