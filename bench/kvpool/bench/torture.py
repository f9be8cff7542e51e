"""`kvpool bench torture`: real daemons are killed under load; what they announced must be there.

Each daemon lives on the SSD folder of the one before. First everything that was announced and not
deleted is pulled and compared, then two client processes publish, read and delete as fast as they
can, and ask which chunks would survive; at a moment that the seed chooses the daemon gets SIGKILL.
Only answers that arrived count. Chunks describe themselves, so that a wrong byte says whose it is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvpool.bench.children import Child, ChildError, Children
from kvpool.bench.report import Row
from kvpool.bench.torture_client import CLIENTS, DEADLINE_S, namespace, prompt, pull
from kvpool.client import Session, connect

KEPT = 40
"""Chains that are kept on the SSD; older ones are deleted, so that nothing has to be evicted."""
LIFE_S = (0.05, 0.8)
"""A daemon is killed so long after the load begins."""
LOOP_S = 120.0
"""When a loop is given up."""
LOOK_S = 0.01
MEMORY = "2MiB"
SSD = "256MiB"


@dataclass
class Tally:
    """What was promised, and what became of it."""

    acknowledged: int = 0
    """Chunks of which a daemon said that they would survive it."""
    wrong: int = 0
    lost: int = 0
    pulled: int = 0
    promised: dict[int, int] = field(default_factory=dict)
    """Chain → how many leading chunks of it must be there."""

    def hear(self, event: dict[str, Any]) -> None:
        """What a client reports, see `torture_client`."""
        self.wrong += event.get("wrong", 0)
        if "chunks" not in event:
            return
        chain, chunks = event["chain"], event["chunks"]
        if not chunks:
            self.promised.pop(chain, None)
        elif chunks > self.promised.get(chain, 0):
            self.acknowledged += chunks - self.promised.get(chain, 0)
            self.promised[chain] = chunks

    def check(self, session: Session) -> None:
        """Pulls all that was promised. What is lost is counted once."""
        for chain, chunks in self.promised.items():
            hits, wrong = pull(session, chain)
            there = sum(hits[:chunks])
            self.wrong += wrong
            self.lost += chunks - there
            self.pulled += there
            self.promised[chain] = chunks if there == chunks else 0
        for chain in sorted(self.promised)[:-KEPT]:
            del self.promised[chain]
            session.delete(prompt(chain))


def run(loops: int, seed: int, progress: Callable[[str], None]) -> Row:
    """Counts over `loops` killed daemons: loops, acknowledged, wrong, lost. And what pulls found:
    `pulled` chunks that were there and right."""
    dice = random.Random(seed)
    tally, start = Tally(), time.monotonic()
    with Children() as children:
        clients = [_client(children, number) for number in range(CLIENTS)]
        following = list(range(CLIENTS))
        for number in range(loops + 1):
            children.deadline = time.monotonic() + LOOP_S
            daemon, address = _start(children, number)
            with connect(address, deadline_s=DEADLINE_S) as client:
                tally.check(client.open(namespace()))
            if number == loops:
                break
            for at, child in enumerate(clients):
                child.send(address=address, seed=dice.getrandbits(32), next=following[at])
            _listen(children, clients, tally, dice.uniform(*LIFE_S))
            children.kill(daemon)
            following = [_until_ended(children, child, tally) for child in clients]
            progress(
                f"seed {seed}: {number + 1} of {loops} daemons killed, {tally.acknowledged} chunks "
                f"announced, {tally.wrong} wrong, {tally.lost} lost"
            )
    return {
        "loops": loops,
        "acknowledged": tally.acknowledged,
        "wrong": tally.wrong,
        "lost": tally.lost,
        "pulled": tally.pulled,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
    }


def _client(children: Children, number: int) -> Child:
    return children.start(f"client{number}", ["-m", "kvpool.bench.torture_client"])


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


def _listen(children: Children, clients: list[Child], tally: Tally, seconds: float) -> None:
    """Hears both clients for so long. Raises `ChildError` if one is done before the kill."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        children.check()
        for child in clients:
            event = child.poll(min(left, LOOK_S))
            if event is None:
                continue
            if "ended" in event:
                raise ChildError(f"{child.name} ended under a living daemon: {event['ended']}")
            tally.hear(event)


def _until_ended(children: Children, child: Child, tally: Tally) -> int:
    """Hears the rest of what a client has to say; returns its next chain."""
    while "ended" not in (event := children.receive(child)):
        tally.hear(event)
    following: int = event["next"]
    return following
