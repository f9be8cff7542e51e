"""A client of `kvpool bench torture`, in a process of its own: commands on stdin, events on stdout.

Both are JSON objects, one a line. A command names a daemon's `address`, a `seed` and the `next`
chain, and is carried out until the daemon answers no more. Events: `chain` and how many of its
leading `chunks` the daemon said would survive it (0: it is about to be deleted), what pulls found
`wrong`, and last `ended` (why) with the `next` chain. Of two clients one has the even chains.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import numpy as np

from kvpool.client import Namespace, Session, connect, native
from kvpool.proto.errors import KvpoolError
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes

CLIENTS = 2
CHAIN = 8
"""Chunks of a chain."""
TOKENS = 4
PAYLOAD_BYTES = 8 << 10
LINE = 64
DEADLINE_S = 30.0
RECENT = (0, 1, 3, 6, 10)
"""Chains back of which is asked what would survive, and one of which may be deleted."""
OLD = 20
"""Chains back of which one is pulled: of some, memory has no copy any more."""
DELETED = 0.1
"""Share of the turns that delete."""


def namespace() -> Namespace:
    """Chunks of two planes."""
    return Namespace(
        model="bench-torture",
        revision="1",
        kv_dtype="uint8",
        kv_scales="none",
        layout="native:bench",
        chunk_tokens=TOKENS,
        parts=(native("kv", layers=("0", "1"), nbytes=PAYLOAD_BYTES // 2),),
        key_scheme="tokens",
        adapter="none",
        rope="none",
        salt="none",
    )


def prompt(chain: int) -> list[int]:
    return [chain * CHAIN * TOKENS + at for at in range(CHAIN * TOKENS)]


def payload(chain: int, chunk: int) -> Bytes:
    """Lines of 64 bytes: whose they are (16), where (8), the chunk (8), and 32 that follow."""
    name = hashlib.sha256(f"chain {chain}".encode()).digest()[:16]
    lines = []
    for offset in range(0, PAYLOAD_BYTES, LINE):
        head = name + offset.to_bytes(8, "little") + chunk.to_bytes(8, "little")
        lines.append(head + hashlib.shake_128(head).digest(32))
    return np.frombuffer(b"".join(lines), np.uint8)


def pull(session: Session, chain: int) -> tuple[list[bool], int]:
    """Whether each matched chunk of `chain` was delivered, and how many had wrong bytes."""
    into = session.payload(CHAIN)
    with session.match(prompt(chain)) as match:
        pulled = session.pull(match, into[: match.chunks])
    hits = [bool(outcome == Outcome.HIT) for outcome in pulled.outcomes]
    wrong = sum(
        hit and not np.array_equal(into[chunk], payload(chain, chunk))
        for chunk, hit in enumerate(hits)
    )
    return hits, wrong


def one_turn(session: Session, chain: int, dice: random.Random) -> None:
    """Publishes `chain`; asks, pulls and deletes older ones."""
    session.publish(prompt(chain), [payload(chain, chunk) for chunk in range(CHAIN)])
    recent = [chain - CLIENTS * back for back in RECENT if chain >= CLIENTS * back]
    for other in recent:
        told = [one.durable for one in session.explain(prompt(other))]
        leading = told.index(False) if False in told else len(told)
        if leading:
            _emit(chain=other, chunks=leading)
    old = chain - CLIENTS * dice.randrange(OLD)
    if old >= 0:
        _, wrong = pull(session, old)
        if wrong:
            _emit(chain=old, wrong=wrong)
    if dice.random() < DELETED:  # it may or may not survive: nothing is promised any more
        gone = dice.choice(recent)
        _emit(chain=gone, chunks=0)
        session.delete(prompt(gone))


def _live(address: str, seed: int, chain: int) -> tuple[int, str]:
    """Turns until the daemon is gone; the next chain, and why it ended."""
    dice = random.Random(seed)
    try:
        with connect(address, deadline_s=DEADLINE_S) as client:
            session = client.open(namespace())
            while True:
                chain += CLIENTS
                one_turn(session, chain - CLIENTS, dice)
    except KvpoolError as error:
        return chain, str(error)


def _emit(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    """Carries out commands until stdin ends."""
    for line in sys.stdin:
        command = json.loads(line)
        chain, why = _live(command["address"], command["seed"], command["next"])
        _emit(ended=why, next=chain)


if __name__ == "__main__":
    main()
