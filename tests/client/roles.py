"""What the processes of `test_processes.py` do. Each role talks to the test in lines: it prints
what has happened, and goes on when it is told to.
"""

import sys
import time
from typing import Any

import numpy as np

from kvpool.client import Client, Namespace, Outcome, Session, connect
from kvpool.client.extents import PartFormat
from kvpool.transfer.copying import Bytes
from tests.client.samples import blob, generation_of, namespace, opaque, prompt

NBYTES = 1 << 20
PLANES = 4


def space(salt: str) -> Namespace:
    """Chunks of 1 MiB in four planes."""
    return namespace(opaque(planes=PLANES, nbytes=NBYTES // PLANES), salt=salt)


def payloads(session: Session, tokens: list[int], generation: int) -> list[Bytes]:
    """Self-describing bytes for every full chunk of `tokens`."""
    keys = session.keys(tokens)
    return [blob(keys[i : i + 32], generation, NBYTES) for i in range(0, len(keys), 32)]


def check(session: Session, tokens: list[int]) -> int:
    """Pulls what is stored of `tokens` and looks whose bytes they are; the number of chunks."""
    with session.match(tokens) as match:
        out = session.payload(match.chunks)
        pulled = session.pull(match, out)
        for chunk in range(match.chunks):
            assert pulled.outcomes[chunk] == Outcome.HIT, pulled
            generation_of(out[chunk], match.key(chunk))
        return match.chunks


def say(*words: object) -> None:
    print(*words, flush=True)


def wait() -> str:
    """The next word of the test; empty at its end."""
    return sys.stdin.readline().strip()


def writer(client: Client, salt: str, seed: str, lease_s: str) -> None:
    """Reserves, waits, writes, waits, commits."""
    session = client.open(space(salt))
    tokens = prompt(2, seed=int(seed))
    publication = session.publication(tokens, lease_s=float(lease_s))
    say("reserved", publication.outcomes.tolist())
    wait()
    for chunk, payload in enumerate(payloads(session, tokens, 666)):
        publication.write(chunk, payload)
    say("written")
    wait()
    say("committed", publication.commit().tolist())


def reader(client: Client, salt: str, seed: str, seconds: str) -> None:
    """Pulls slowly: each chunk takes `seconds`."""
    deliver = PartFormat.deliver

    def slow(*arguments: Any) -> Any:
        say("pulling")
        time.sleep(float(seconds))
        return deliver(*arguments)

    PartFormat.deliver = slow  # type: ignore[assignment, method-assign]
    session = client.open(space(salt))
    tokens = prompt(4, seed=int(seed))
    match = session.match(tokens)
    out = session.payload(match.chunks)
    pulled = session.pull(match, out)
    hits = np.flatnonzero(pulled.outcomes == Outcome.HIT).tolist()
    generations = [generation_of(out[chunk], match.key(chunk)) for chunk in hits]
    say("pulled", pulled.outcomes.tolist(), generations)


def rival(client: Client, salt: str, generation: str) -> None:
    """Publishes the same chunks as all its rivals, with bytes of its own, when it is told to."""
    session = client.open(space(salt))
    tokens = prompt(2)
    mine = payloads(session, tokens, int(generation))
    say("ready")
    wait()
    published = session.publish(tokens, mine)
    say("published", published.outcomes.tolist())


if __name__ == "__main__":
    role, address, *arguments = sys.argv[1:]
    with connect(address) as connected:
        globals()[role](connected, *arguments)
