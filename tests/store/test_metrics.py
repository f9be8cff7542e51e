"""What a daemon tells: counters that only grow, gauges that are never negative, HTTP codes."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families

from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.store import http as http_module
from kvpool.store.caller import hello
from kvpool.store.embedded import embedded_service
from kvpool.store.http import HEADER_BYTES_MAX, HttpPort
from kvpool.store.metrics import exposition
from kvpool.store.service import Connection, Service
from tests.store.daemons import Chunks, namespace

CARRIER = {
    "event_loop_lag_s": 0.0,
    "loops": {"reap": {"last_run_age_s": 0.1, "failures": 0}},
    "worker_restarts": 0,
    "worker_pids": {},
}


@pytest.fixture
def service() -> Iterator[Service]:
    made = embedded_service(1 << 20)
    made.carrier_status = lambda: CARRIER
    yield made
    made.domains["local"].pool.close()


def ask(connection: Connection, body: Message) -> Any:
    return connection.handle(protocol.parse_request(protocol.request_body(1, body)))


def samples(service: Service) -> tuple[dict[str, float], dict[str, float]]:
    """(counters, gauges) by name and labels."""
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    text = exposition(service.status).decode()
    for family in text_string_to_metric_families(text):
        into = counters if family.type == "counter" else gauges
        into.update({f"{s.name}{sorted(s.labels.items())}": s.value for s in family.samples})
    return counters, gauges


@pytest.mark.parametrize("seed", range(3))
def test_counters_only_grow_and_gauges_are_never_negative(service: Service, seed: int) -> None:
    draw = random.Random(seed)
    chunks = Chunks(namespace(), 6)
    connections: list[tuple[Connection, int, list[bytes]]] = []
    before, _ = samples(service)
    for _ in range(60):
        if not connections or draw.random() < 0.1:
            connection = service.connect(local=True)
            ask(connection, hello("", "test"))
            space = chunks.space
            opened = ask(
                connection,
                wire.Open(namespace=space.to_record(), digest=space.digest("default")),
            )
            connections.append((connection, opened.namespace, []))
        connection, number, leases = draw.choice(connections)
        keys = chunks.packed[: 32 * draw.randint(1, 6)]
        body = draw.choice(
            [
                wire.Match(namespace=number, keys=keys),
                wire.Reserve(namespace=number, keys=keys),
                wire.Commit(lease=leases[-1] if leases else b""),
                wire.Abort(lease=leases[-1] if leases else b""),
                wire.Release(leases=b"".join(leases[-2:]) or b"x" * 16),
                wire.Pin(namespace=number, keys=keys, unpin=draw.random() < 0.5),
                wire.Delete(namespace=number, keys=keys),
                wire.Hint(namespace=number, keys=keys, stop_reason="stop", ttl_ms=1),
                wire.Clear(),
                wire.Match(namespace=999, keys=b"?"),
            ]
        )
        answer = ask(connection, body)
        if isinstance(answer, wire.Matched | wire.Reserved) and answer.lease:
            leases.append(answer.lease)
        if draw.random() < 0.1:
            connection.close()
            connections.remove((connection, number, leases))
        counters, gauges = samples(service)
        assert all(counters[name] >= value for name, value in before.items())
        assert all(value >= 0 for value in gauges.values())
        before = counters
    for connection, _, _ in connections:
        connection.close()
    _, gauges = samples(service)
    idle = ["kvpool_connections[]", "kvpool_leases[('domain', 'local')]"]
    idle += [f"kvpool_bytes[('by', '{by}'), ('domain', 'local')]" for by in ("leased", "writing")]
    assert {name: gauges[name] for name in idle} == dict.fromkeys(idle, 0.0)


def test_policies_hints_pins_and_tenants_have_their_figures(service: Service) -> None:
    chunks = Chunks(namespace(), 6)
    connection, keys = service.connect(local=True), chunks.packed
    ask(connection, hello("", "test"))
    space = chunks.space
    opened = ask(connection, wire.Open(namespace=space.to_record(), digest=space.digest("default")))
    number = opened.namespace
    reserved = ask(connection, wire.Reserve(namespace=number, keys=keys))
    ask(connection, wire.Commit(lease=reserved.lease))
    for _ in range(2):
        ask(connection, wire.Pin(namespace=number, keys=keys[: 2 * 32]))
    ask(connection, wire.Hint(namespace=number, keys=keys, stop_reason="tool_calls", ttl_ms=60000))
    counters, gauges = samples(service)
    [known] = service.domains["local"].store.namespaces.values()
    nbytes = known.chunk_bytes
    where = "('domain', 'local')"
    tier = "('policy', 'phz')"
    shape = f"('shape', '{known.shape[0]}'), ('tier', 'dram')"
    expected_gauges = {
        f"kvpool_tenant_bytes[('by', 'used'), {where}, ('tenant', 'default')]": 6 * nbytes,
        f"kvpool_tenant_bytes[('by', 'pinned'), {where}, ('tenant', 'default')]": 2 * nbytes,
        f"kvpool_tenant_bytes[('by', 'quota'), {where}, ('tenant', 'default')]": 0,
        f"kvpool_pinned_chains[{where}]": 1,
        f"kvpool_pinned_claims[{where}]": 2,
        f"kvpool_ttls[{where}]": 1,
        f"kvpool_policy_rows[{where}, ('owner', ''), {tier}, {shape}]": 6,
        f"kvpool_policy_trusted[{where}, ('owner', ''), {tier}, {shape}]": 0,
        f"kvpool_policy_behind[{where}, ('owner', ''), {tier}, {shape}]": 0,
    }
    expected_counters = {
        f"kvpool_hint_kinds_total[{where}, ('kind', 'stop_reason'), {tier}, ('tier', 'dram')]": 1,
        f"kvpool_hint_kinds_total[{where}, ('kind', 'ttl_s'), {tier}, ('tier', 'dram')]": 1,
        f"kvpool_hint_ends_total[{where}, ('end', 'passed_on'), {tier}, ('tier', 'dram')]": 1,
        f"kvpool_tenant_evicted_chunks_total[{where}, ('tenant', 'default')]": 0,
    }
    assert {name: gauges[name] for name in expected_gauges} == expected_gauges
    assert {name: counters[name] for name in expected_counters} == expected_counters


def test_the_metrics_hold_nothing_of_the_process_around_them(service: Service) -> None:
    counters, gauges = samples(service)
    assert all(name.startswith("kvpool_") for name in (*counters, *gauges))


# ---- HTTP


class Fixed:
    """What the port is told, and a request to it."""

    state: tuple[str, list[str]] = ("ok", [])
    token = ""
    asked = 0

    def __init__(self, service: Service) -> None:
        self._service = service
        self.port = HttpPort(
            state=lambda: self.state,
            status=self._status,
            allows=lambda token: token == self.token,
        )

    def _status(self) -> dict[str, Any]:
        self.asked += 1
        return self._service.status()

    def run(self, client: Callable[[str, int], Awaitable[None]]) -> None:
        async def main() -> None:
            server = await asyncio.start_server(
                self.port.serve, "127.0.0.1", 0, limit=HEADER_BYTES_MAX
            )
            async with asyncio.timeout(10):
                await client(*server.sockets[0].getsockname()[:2])
            server.close()
            await server.wait_closed()

        asyncio.run(main())

    def ask(self, request: bytes) -> tuple[int, bytes]:
        answers: list[bytes] = []

        async def client(host: str, port: int) -> None:
            answers.append(await exchange(host, port, request))

        self.run(client)
        head, _, body = answers[0].partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def get(self, path: str, *headers: str) -> tuple[int, bytes]:
        lines = [f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]
        return self.ask("\r\n".join(lines).encode())


async def exchange(host: str, port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.fixture
def port(service: Service) -> Fixed:
    return Fixed(service)


@pytest.mark.parametrize(
    ("state", "code"), [("ok", 200), ("starting", 503), ("draining", 503), ("degraded", 503)]
)
def test_health_is_200_only_when_all_is_well(port: Fixed, state: str, code: int) -> None:
    port.state = (state, ["a reason"])
    got, body = port.get("/health")
    assert got == code
    assert json.loads(body) == {"status": state, "reasons": ["a reason"]}


def test_metrics_are_text_for_prometheus(port: Fixed) -> None:
    code, body = port.get("/metrics?ignored=1")
    assert code == 200 and b"# TYPE kvpool_matches_total counter" in body


def test_nothing_is_counted_before_the_self_test_has_been_forgotten(port: Fixed) -> None:
    port.state = ("starting", [])
    assert port.get("/metrics")[0] == 503 and not port.asked


def test_metrics_and_reasons_are_only_for_the_right_token(port: Fixed) -> None:
    port.token, port.state = "right", ("degraded", ["figures"])
    assert port.get("/metrics")[0] == 401
    assert port.get("/metrics", "Authorization: Bearer wrong")[0] == 401
    assert port.get("/metrics", "authorization: bearer right")[0] == 200
    assert json.loads(port.get("/health")[1]) == {"status": "degraded"}
    assert b"figures" in port.get("/health", "Authorization: Bearer right")[1]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"\xff\xfe\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"GET /" + b"a" * 2 * HEADER_BYTES_MAX + b" HTTP/1.1\r\n\r\n", 431),
    ],
)
def test_other_requests_get_the_code_that_fits(port: Fixed, request_: bytes, code: int) -> None:
    assert port.ask(request_)[0] == code


def test_a_client_that_never_ends_its_request_is_closed(
    port: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "DEADLINE_S", 0.05)

    async def client(host: str, number: int) -> None:
        assert await exchange(host, number, b"GET /metr") == b""

    port.run(client)


def test_a_flood_of_questions_shares_one_look_at_the_store(port: Fixed) -> None:
    request = b"GET /metrics HTTP/1.1\r\n\r\n"

    async def client(host: str, number: int) -> None:
        answers = await asyncio.gather(*(exchange(host, number, request) for _ in range(40)))
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)

    port.run(client)
    assert port.asked <= 3


def test_more_connections_than_allowed_are_told_so(
    port: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "CONNECTIONS_MAX", 1)

    async def client(host: str, number: int) -> None:
        _, idle = await asyncio.open_connection(host, number)
        while not port.port.connections:
            await asyncio.sleep(0.001)
        answer = await exchange(host, number, b"GET /health HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503")
        idle.close()
        await idle.wait_closed()

    port.run(client)
