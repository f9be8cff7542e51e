"""Any order of verbs: what is pulled is always the bytes of one whole publish of that very key."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.client import LocalStore, Match, Outcome, connect
from tests.client.samples import CHUNK, blob, generation_of, namespace, opaque

NBYTES = 8192
ROOM = 12
"""Chunks that fit, or a few more; the prompts below have 21 different ones."""

prompts = st.builds(
    lambda tail, length: [*[0] * CHUNK, *[tail] * (CHUNK * (length - 1))],
    st.integers(1, 4),
    st.integers(1, 6),
)


class Engines(RuleBasedStateMachine):
    """Two engines share a store that is too small for what they publish."""

    def __init__(self) -> None:
        super().__init__()
        self.store = LocalStore(ROOM * (NBYTES + 4096), chunks=64)
        self.clients = [connect(self.store) for _ in range(2)]
        space = namespace(opaque(planes=2, nbytes=NBYTES // 2))
        self.sessions = [client.open(space) for client in self.clients]
        self.held: list[tuple[Match, list[int]]] = []
        self.generation = 0

    engines = st.integers(0, 1)

    @rule(engine=engines, prompt=prompts, bit_by_bit=st.booleans(), whole=st.booleans())
    def publish(self, engine: int, prompt: list[int], bit_by_bit: bool, whole: bool) -> None:
        session = self.sessions[engine]
        keys = session.keys(prompt)
        self.generation += 1
        payloads = [
            blob(keys[i : i + 32], self.generation, NBYTES) for i in range(0, len(keys), 32)
        ]
        if not bit_by_bit:
            outcomes = session.publish(prompt, payloads).outcomes
        else:
            with session.publication(prompt) as publication:
                for chunk, payload in enumerate(payloads):
                    if whole or chunk % 2 == 0:
                        publication.write(chunk, payload)
                outcomes = publication.commit()
        stored = int(np.isin(outcomes, (Outcome.OK, Outcome.EXISTS)).argmin())
        stored = stored or len(outcomes) * int(outcomes[0] in (Outcome.OK, Outcome.EXISTS))
        with session.match(prompt, peek=True) as match:
            assert match.chunks >= (stored if not bit_by_bit or whole else 0)

    @rule(engine=engines, prompt=prompts, hold=st.booleans())
    def pull(self, engine: int, prompt: list[int], hold: bool) -> None:
        match = self.sessions[engine].match(prompt)
        self.read(engine, match)
        if hold and match.chunks:
            self.held.append((match, self.read(engine, match)))
        else:
            match.release()

    def read(self, engine: int, match: Match) -> list[int]:
        """The generations that were pulled, all chunks of the match."""
        out = self.sessions[engine].payload(match.chunks)
        assert self.sessions[engine].pull(match, out).ok
        return [generation_of(out[i], match.key(i)) for i in range(match.chunks)]

    @rule(number=st.integers(0, 100))
    def release(self, number: int) -> None:
        if self.held:
            match, generations = self.held.pop(number % len(self.held))
            assert self.read(0, match) == generations
            match.release()

    @rule(engine=engines, prompt=prompts)
    def delete(self, engine: int, prompt: list[int]) -> None:
        self.sessions[engine].delete(prompt)
        assert self.sessions[1 - engine].match(prompt).chunks == 0

    @rule(engine=engines, prompt=prompts, unpin=st.booleans())
    def pin(self, engine: int, prompt: list[int], unpin: bool) -> None:
        if unpin:
            self.sessions[engine].unpin(prompt)
        else:
            outcomes = self.sessions[engine].pin(prompt)
            assert self.sessions[engine].match(prompt).chunks == outcomes.count(Outcome.HIT)

    @rule(engine=engines)
    def clear(self, engine: int) -> None:
        self.sessions[engine].clear()

    @invariant()
    def the_store_is_sound(self) -> None:
        self.store.service.domains["local"].store.check_integrity()

    def teardown(self) -> None:
        for match, generations in self.held:
            assert self.read(1, match) == generations
            match.release()
        assert not self.store.service.leases
        for client in self.clients:
            client.close()
        self.store.close()


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=30, stateful_step_count=25)
