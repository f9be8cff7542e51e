"""`kvpool bench torture`: real daemons are killed under load; what they announced must be there.

Each daemon lives on the SSD folder of the one before. First everything that was announced and not
deleted is pulled and compared, then a client publishes, reads and deletes as fast as it can, and
asks which chunks would survive; at a moment that the seed chooses the daemon gets SIGKILL. Only
answers that arrived count. Chunks describe themselves, so that a wrong byte says whose it is.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.bench.children import Child, Children
from kvpool.client import Client, Namespace, Session, connect, native
from kvpool.proto.errors import KvpoolError
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes

CHAIN = 8
"""Chunks of a chain."""
TOKENS = 4
PAYLOAD_BYTES = 8 << 10
LINE = 64
KEPT = 200
"""Chains that are kept on the SSD; older ones are deleted, so that nothing has to be evicted."""
LIFE_S = (0.05, 0.8)
"""A daemon is killed so long after the load begins."""
MEMORY = "4MiB"
SSD = "256MiB"


@dataclass
class Tally:
    """What was promised, and what became of it."""

    loops: int = 0
    acknowledged: int = 0
    """Chunks of which a daemon said that they would survive it."""
    wrong: int = 0
    lost: int = 0
    promised: dict[int, int] = field(default_factory=dict)
    """Chain → how many leading chunks of it must be there."""
    next_chain: int = 0


def run(loops: int, seed: int, progress: Callable[[str], None]) -> dict[str, int]:
    """Counts over `loops` killed daemons: loops, acknowledged, wrong, lost. And what pulls found:
    `pulled` chunks that were there and right."""
    dice = random.Random(seed)
    tally, pulled = Tally(), 0
    with Children() as children:
        for number in range(loops):
            daemon, address = _start(children, number)
            with connect(address, deadline_s=30) as client:
                session = client.open(namespace())
                pulled += _check(session, tally)
                _load_until_killed(children, daemon, client, session, tally, dice)
            tally.loops += 1
            progress(
                f"{tally.loops} of {loops} daemons killed, {tally.acknowledged} chunks announced, "
                f"{tally.wrong} wrong, {tally.lost} lost"
            )
        daemon, address = _start(children, loops)
        with connect(address, deadline_s=30) as client:
            pulled += _check(client.open(namespace()), tally)
    return {
        "loops": tally.loops,
        "acknowledged": tally.acknowledged,
        "wrong": tally.wrong,
        "lost": tally.lost,
        "pulled": pulled,
    }


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


def _start(children: Children, number: int) -> tuple[Child, str]:
    socket = str(children.folder / "kvpool.sock")
    program = "from kvpool.cli import main; main()"
    mode = ("write_through", "write_back")[number % 2]
    options = ["--capacity", MEMORY, "--ssd-path", str(children.folder / "ssd")]
    options += ["--ssd-capacity", SSD, "--ssd-mode", mode, "--log-level", "warning"]
    serve = ["-c", program, "serve", "--json", "--socket", socket, *options]
    daemon = children.start("daemon", serve)
    children.receive(daemon)
    return daemon, f"unix:{socket}"


def _check(session: Session, tally: Tally) -> int:
    """Pulls all that was promised; returns the chunks that were right."""
    into = session.payload(CHAIN)
    right = 0
    for chain, chunks in tally.promised.items():
        with session.match(prompt(chain)) as match:
            pulled = session.pull(match, into[: match.chunks])
            good = [bool(outcome == Outcome.HIT) for outcome in pulled.outcomes]
        for chunk, hit in enumerate(good):
            if hit and not np.array_equal(into[chunk], payload(chain, chunk)):
                tally.wrong += 1
            elif hit:
                right += 1
        tally.lost += max(0, chunks - sum(good))
    for chain in sorted(tally.promised)[:-KEPT]:
        del tally.promised[chain]
        session.delete(prompt(chain))
    return right


def _load_until_killed(
    children: Children,
    daemon: Child,
    client: Client,
    session: Session,
    tally: Tally,
    dice: random.Random,
) -> None:
    """Publishes, reads and deletes from another thread until SIGKILL."""
    stop = threading.Event()
    failures: list[BaseException] = []
    choices = random.Random(dice.random())

    def load() -> None:
        try:
            while not stop.is_set():
                _one_turn(session, tally, choices)
        except KvpoolError as error:
            if not stop.is_set():
                failures.append(error)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=load, name="load")
    thread.start()
    time.sleep(dice.uniform(*LIFE_S))
    stop.set()  # before the kill: errors from now on are expected
    children.kill(daemon)
    thread.join()
    if failures:
        raise failures[0]


def _one_turn(session: Session, tally: Tally, choices: random.Random) -> None:
    chain = tally.next_chain
    tally.next_chain += 1
    session.publish(prompt(chain), [payload(chain, chunk) for chunk in range(CHAIN)])
    recent = [chain - back for back in (0, 1, 3, 6, 10) if chain >= back]
    for other in recent:
        told: list[Any] = session.explain(prompt(other))
        durable = [one.durable for one in told]
        leading = durable.index(False) if False in durable else len(durable)
        if leading > tally.promised.get(other, 0):
            tally.acknowledged += leading - tally.promised.get(other, 0)
            tally.promised[other] = leading
    if choices.random() < 0.1:  # a deletion may or may not survive: then nothing is promised
        gone = choices.choice(recent)
        tally.promised.pop(gone, None)
        session.delete(prompt(gone))
