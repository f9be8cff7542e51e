"""Seeded traces of the kinds that engines see, for replays and tests without a recorded trace.

A session asks, step by step, for all that it said so far and a little more. What differs is how
prompts grow, how long the gaps are and when sessions end. Odds and gaps follow published figures:
after a tool call an agent goes on with P = 0.97 after a median of 17 s, after an ended turn a
person does with P = 0.71 after 184 s. `random` draws all of it: loads that nobody had in mind.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, merge
from itertools import count, islice

from kvpool.bench.traces import Trace, make_trace

Turn = tuple[float, list[int]]
"""(seconds, blocks of the prompt), or in a session (seconds until its next step, blocks)."""
Turns = Iterator[Turn]


def workload_names() -> tuple[str, ...]:
    """The names that `make_workload` accepts."""
    return tuple(_WORKLOADS)


def make_workload(name: str, *, seed: int = 1, scale: float = 1.0) -> Trace:
    """The trace of this name, `scale` times as long. `KeyError` for an unknown name."""
    dice = random.Random(f"{name} {seed}")
    return make_trace(name, _WORKLOADS[name](dice, scale))


class _Blocks:
    """Gives numbers that nobody used before."""

    def __init__(self) -> None:
        self._numbers = count()

    def new(self, n: int) -> list[int]:
        return [next(self._numbers) for _ in range(n)]


def _play(
    dice: random.Random, until_s: float, every_s: float, session: Callable[[], Turns]
) -> Turns:
    """The turns of sessions that begin every `every_s` on average, in order of time."""
    order = count()
    due: list[tuple[float, int, Turns | None]] = [(0.0, next(order), None)]
    while due[0][0] <= until_s:
        now, _, running = heappop(due)
        if running is None:
            heappush(due, (now + dice.expovariate(1 / every_s), next(order), None))
            running = session()
        for gap_s, blocks in running:
            yield now, blocks
            heappush(due, (now + gap_s, next(order), running))
            break


def _around(dice: random.Random, median: float, sigma: float = 1.0) -> float:
    """A long-tailed positive number."""
    return dice.lognormvariate(math.log(median), sigma)


def _zipf(n: int, skew: float = 1.0) -> list[float]:
    """How often the first, second, ... of n things are asked for."""
    return [1 / rank**skew for rank in range(1, n + 1)]


# ---- how requests come


def _talk(
    dice: random.Random,
    blocks: _Blocks,
    prompt: list[int],
    goes_on: float,
    gap_s: tuple[float, float],
    growth: int,
    longest: float = math.inf,
) -> Turns:
    """A session that goes on with this probability, after gaps of this median and sigma."""
    while dice.random() < goes_on and len(prompt) < longest:
        yield _around(dice, *gap_s), list(prompt)
        prompt = prompt + blocks.new(dice.randint(0, growth))
    yield math.inf, list(prompt)


def _asked(
    dice: random.Random,
    blocks: _Blocks,
    requests: int,
    known: list[list[int]],
    popularity: list[float],
    share: float,
    once: Callable[[], list[int]],
) -> Turns:
    """Questions about known prompts; the rest are prompts that come once."""
    for number in range(requests):
        if dice.random() < share:
            yield number, dice.choices(known, popularity)[0] + blocks.new(dice.randint(0, 2))
        else:
            yield number, once()


def _rounds(
    dice: random.Random, prompts: list[list[int]], requests: int, *, shuffled: bool
) -> Turns:
    """The same prompts again and again, in one order or another each time."""
    for number in range(requests):
        if shuffled and number % len(prompts) == 0:
            dice.shuffle(prompts)
        yield number, prompts[number % len(prompts)]


def _stack(
    dice: random.Random,
    requests: int,
    depth: tuple[float, float],
    again: float,
    new: Callable[[], list[int]],
) -> Turns:
    """What was asked lately is asked again, at depths of this median and sigma."""
    stack: list[list[int]] = []
    for number in range(requests):
        at = int(_around(dice, *depth))
        if at < len(stack) and dice.random() < again:
            stack.append(stack.pop(-1 - at))
        else:
            stack.append(new())
        yield number, stack[-1]


# ---- workloads


def _agents(dice: random.Random, scale: float) -> Turns:
    """Coding agents: a shared system prompt, dozens of quick tool calls, prompts that only grow."""
    blocks = _Blocks()
    systems = [blocks.new(length) for length in (18, 12, 25)]

    def session() -> Turns:
        prompt = dice.choice(systems) + blocks.new(dice.randint(1, 8))
        while True:
            called_tool = dice.random() < 0.9
            if dice.random() > (0.97 if called_tool else 0.71):
                yield math.inf, list(prompt)
                return
            yield _around(dice, 17 if called_tool else 184), list(prompt)
            prompt += blocks.new(dice.randint(0, 5))
            if len(prompt) > 400:  # the agent sums up and starts anew
                prompt = prompt[:12] + blocks.new(20)

    return _play(dice, scale * 7200, 60, session)


def _chats(dice: random.Random, scale: float) -> Turns:
    """People who talk to assistants: a few popular system prompts, few turns, long gaps."""
    blocks = _Blocks()
    systems = [blocks.new(dice.randint(1, 12)) for _ in range(30)]
    popularity = _zipf(30)

    def session() -> Turns:
        prompt = dice.choices(systems, popularity)[0] + blocks.new(math.ceil(_around(dice, 2)))
        return _talk(dice, blocks, prompt, 0.71, (184, 1.1), 3)

    return _play(dice, scale * 7200, 2, session)


def _documents(dice: random.Random, scale: float) -> Turns:
    """Questions about documents, some popular, behind one system prompt; half of them come once."""
    blocks = _Blocks()
    system = blocks.new(4)
    known = [system + blocks.new(dice.randint(2, 12)) for _ in range(1500)]

    def once() -> list[int]:
        return system + blocks.new(dice.randint(5, 30))

    return _asked(dice, blocks, int(scale * 6000), known, _zipf(1500, 0.8), 0.5, once)


def _cycles(dice: random.Random, scale: float) -> Turns:
    """A nightly job that reads the same documents in the same order again and again."""
    blocks = _Blocks()
    documents = [blocks.new(dice.randint(3, 12)) for _ in range(400)]
    return _rounds(dice, documents, int(scale * 4000), shuffled=False)


def _recent(dice: random.Random, scale: float) -> Turns:
    """What was asked lately is asked again: made for LRU."""
    blocks = _Blocks()
    return _stack(dice, int(scale * 6000), (50, 1.5), 0.85, lambda: blocks.new(dice.randint(2, 15)))


def _phases(dice: random.Random, scale: float) -> Turns:
    """One kind of load after another: what was learned of one is wrong for the next."""
    offset, start_s = 0, 0.0
    for kind in (_chats, _cycles, _agents, _recent, _documents):
        top, end_s = 0, 0.0
        for end_s, prompt in kind(dice, 0.4 * scale):
            top = max(top, *prompt)
            yield start_s + end_s, [offset + block for block in prompt]
        offset, start_s = offset + top + 1, start_s + end_s


def _random(dice: random.Random, scale: float) -> Turns:
    """Up to three loads of any kinds and parameters, mixed or one after the other."""
    blocks = _Blocks()
    requests = int(scale * _any(dice, 500, 8000))
    loads = []
    for _ in range(dice.randint(1, 3)):
        length = dice.randint(requests // 4, requests)
        loads.append((length, dice.choice(_LOADS)(dice, blocks, length)))
    if dice.random() < 0.5:
        yield from merge(*(load for _, load in loads))
        return
    start_s = 0.0
    for length, load in loads:
        for time_s, prompt in load:
            yield start_s + time_s, prompt
        start_s += 2 * length


# ---- what `random` draws: about one request per second


def _any(dice: random.Random, least: float, most: float) -> int:
    """A number whose logarithm is uniform."""
    return round(math.exp(dice.uniform(math.log(least), math.log(most))))


def _any_sessions(dice: random.Random, blocks: _Blocks, requests: int) -> Turns:
    """Agents or people, of any patience and number."""
    systems = [blocks.new(_any(dice, 1, 40)) for _ in range(_any(dice, 1, 30))]
    popularity = _zipf(len(systems))
    goes_on = dice.uniform(0.4, 0.99)
    gap_s = (_any(dice, 3, requests / 3), dice.uniform(0.3, 1.5))
    first, growth, longest = _any(dice, 1, 40), _any(dice, 1, 10), _any(dice, 60, 400)

    def session() -> Turns:
        prompt = dice.choices(systems, popularity)[0] + blocks.new(dice.randint(1, first))
        return _talk(dice, blocks, prompt, goes_on, gap_s, growth, longest)

    return islice(_play(dice, math.inf, 1 / (1 - goes_on), session), requests)


def _any_documents(dice: random.Random, blocks: _Blocks, requests: int) -> Turns:
    """Documents of any length and popularity, and prompts that come once."""
    system = blocks.new(dice.randint(0, 8))
    longest, share = _any(dice, 3, 60), dice.uniform(0.2, 1)
    known = [system + blocks.new(dice.randint(1, longest)) for _ in range(_any(dice, 50, 3000))]
    popularity = _zipf(len(known), dice.uniform(0.4, 1.4))

    def once() -> list[int]:
        return system + blocks.new(dice.randint(1, longest))

    yield from _asked(dice, blocks, requests, known, popularity, share, once)


def _any_rounds(dice: random.Random, blocks: _Blocks, requests: int) -> Turns:
    longest, shuffled = _any(dice, 3, 60), dice.random() < 0.5
    prompts = [blocks.new(dice.randint(1, longest)) for _ in range(_any(dice, 20, 1000))]
    yield from _rounds(dice, prompts, requests, shuffled=shuffled)


def _any_stack(dice: random.Random, blocks: _Blocks, requests: int) -> Turns:
    longest, again = _any(dice, 3, 60), dice.uniform(0.5, 0.95)
    depth = (_any(dice, 5, 300), dice.uniform(0.5, 2))
    yield from _stack(dice, requests, depth, again, lambda: blocks.new(dice.randint(1, longest)))


def _any_samples(dice: random.Random, blocks: _Blocks, requests: int) -> Turns:
    """Roll-outs: many answers to each prompt within a while, for an epoch or several."""
    longest, grown = _any(dice, 3, 60), _any(dice, 1, 20)
    prompts = [blocks.new(dice.randint(1, longest)) for _ in range(_any(dice, 20, 1000))]
    answers, together = dice.randint(2, 16), _any(dice, 1, 64)
    number = 0
    while number < requests:
        dice.shuffle(prompts)
        for first in range(0, len(prompts), together):
            due = prompts[first : first + together] * answers
            dice.shuffle(due)
            for prompt in due:
                yield number, prompt + blocks.new(dice.randint(0, grown))
                number += 1
                if number == requests:
                    return


_LOADS = (_any_sessions, _any_sessions, _any_documents, _any_rounds, _any_stack, _any_samples)
"""Sessions twice: most engines serve them."""

_WORKLOADS: dict[str, Callable[[random.Random, float], Turns]] = {
    "agents": _agents,
    "chats": _chats,
    "documents": _documents,
    "cycles": _cycles,
    "recent": _recent,
    "phases": _phases,
    "random": _random,
}
