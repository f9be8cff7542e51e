"""What a store says of itself: the figures behind `kvpool status` and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvpool.proto.chunk import extent_bytes
from kvpool.store.accounts import Account
from kvpool.store.store import KnownNamespace, Store


def domain_status(store: Store, tenant: str | None) -> dict[str, Any]:
    """JSON-able figures of `store`; of namespaces only those of `tenant` unless it is None."""
    allocator = store.allocator
    spaces = [k for k in store.namespaces.values() if tenant in (None, k.tenant)]
    return {
        "epoch": store.epoch,
        "ready": store.capacity_bytes,
        "policy": store.options.policy,
        "chunks": store.index.count,
        "chunks_max": store.index.capacity,
        "leases": len(store.leases),
        "bytes": store.figures(),
        "slabs": asdict(allocator.statistics()) if allocator else {},
        "counters": asdict(store.counters),
        "pins": {"chains": len(store.pins), "claims": store.pins.claims},
        "tenants": [
            _account_status(account)
            for account in store.room.accounts
            if tenant in (None, account.tenant)
        ],
        "namespaces": [_namespace_status(store, known) for known in spaces],
        "policies": [
            {"shape": "+".join(map(str, shape)), "owner": owner, **policy.statistics()}
            for (shape, owner), policy in store.policies.items()
            if tenant in (None, owner) or not owner
        ],
        "ttls": len(store.hints),
        "ssd": store.ssd.status() if store.ssd is not None else None,
        "warnings": _unmet(spaces) + (store.ssd.warnings() if store.ssd is not None else []),
    }


def _account_status(account: Account) -> dict[str, Any]:
    return {
        "tenant": account.tenant,
        "used": account.used,
        "pinned": account.pinned,
        "evicted_chunks": account.evicted_chunks,
        **asdict(account.limits),
    }


def _namespace_status(store: Store, known: KnownNamespace) -> dict[str, Any]:
    return {
        "id": known.id,
        "tenant": known.tenant,
        "digest": known.digest.hex(),
        "record": known.namespace.to_record().SerializeToString(deterministic=True).hex(),
        "model": known.namespace.model,
        "chunk_tokens": known.namespace.chunk_tokens,
        "layout_id": f"{known.namespace.layout_id:016x}",
        "parts": [
            {
                "name": part.name,
                "planes": len(part.planes),
                "nbytes": part.nbytes,
                "extent_bytes": extent_bytes(part),
            }
            for part in known.namespace.parts
        ],
        "chunk_bytes": sum(known.extent_bytes),
        "published": known.published,
        "hit_chunks": known.hit_chunks,
        "missed": known.missed,
        "prefill_tokens_s": store.ssd.prefill_tokens_s(known) if store.ssd is not None else 0.0,
    }


def _unmet(spaces: Sequence[KnownNamespace]) -> list[str]:
    """Writers and readers that use different namespaces look like this: say so."""
    writers = [k for k in spaces if k.published >= 20 and not k.hit_chunks]
    readers = [k for k in spaces if k.missed >= 20 and not k.hit_chunks and not k.published]
    return [
        f"writers and readers use different namespaces: {w.published} chunks published in "
        f"{w.digest.hex()[:16]} were never matched, {r.missed} matches missed in "
        f"{r.digest.hex()[:16]}; they differ in "
        + ("; ".join(w.namespace.differences(r.namespace)) or "tenant")
        for w in writers
        for r in readers
    ]
