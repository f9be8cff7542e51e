"""The service without sockets: who may do what, and what each answer says."""

import itertools
from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import DeniedError, from_code
from kvpool.store.caller import hello
from kvpool.store.embedded import embedded_service
from kvpool.store.service import (
    INTERNAL_TENANT,
    TICKETS_MAX,
    Connection,
    DataEndpoint,
    Identity,
    Service,
    new_domain,
)
from tests.store.daemons import Chunks, namespace

MIB = 1 << 20
IDENTITIES = {
    "a": Identity("a", "shared", mapped=True),
    "b": Identity("b", "shared", mapped=True),
    "c": Identity("c", "apart", mapped=False),
}


def counting_entropy() -> Callable[[int], bytes]:
    numbers = itertools.count(1)
    return lambda n: next(numbers).to_bytes(8, "big").rjust(n, b"\7")


@pytest.fixture
def service() -> Service:
    entropy = counting_entropy()
    domains = {
        name: new_domain(name, 4 * MIB, clock=lambda: 0.0, entropy=entropy)
        for name in ("shared", "apart")
    }

    def authenticate(token: str, local: bool) -> Identity:
        if token not in IDENTITIES:
            raise DeniedError("the token is wrong")
        return IDENTITIES[token]

    made = Service(domains, authenticate=authenticate, entropy=entropy, attach_address="unix:/x")
    for domain in domains.values():
        domain.pool.grow_lazily()
    return made


def ask(connection: Connection, body: Message) -> Message:
    frame = protocol.request_body(1, body)
    answer = connection.handle(protocol.parse_request(frame))
    assert answer is not None
    if isinstance(answer, wire.Error):
        raise from_code(answer.code, answer.text)
    return answer


def welcome_of(connection: Connection, token: str, worker: bytes = b"") -> wire.Welcome:
    answer = ask(connection, hello(token, "test", worker))
    assert isinstance(answer, wire.Welcome)
    return answer


def refusal(connection: Connection, body: Message) -> str:
    answer = connection.handle(protocol.parse_request(protocol.request_body(1, body)))
    assert isinstance(answer, wire.Error), answer
    return answer.text


def open_space(connection: Connection, tenant: str) -> int:
    space = namespace()
    opened = ask(connection, wire.Open(namespace=space.to_record(), digest=space.digest(tenant)))
    assert isinstance(opened, wire.Opened)
    return opened.namespace


def test_the_tenant_and_its_rights_come_from_the_credential(service: Service) -> None:
    welcome = welcome_of(service.connect(local=True), "a")
    assert (welcome.tenant, welcome.domain, welcome.mapped) == ("a", "shared", True)
    assert welcome.attach_address == "unix:/x"
    welcome = welcome_of(service.connect(local=True), "c")
    assert not welcome.mapped and not welcome.attach_address


def test_a_client_of_another_machine_may_not_map(service: Service) -> None:
    connection = service.connect(local=False, host="10.0.0.1")
    assert not welcome_of(connection, "a").mapped
    assert "byte stream" in refusal(connection, wire.Attach())
    assert not connection.attached


def test_a_client_that_cannot_map_cannot_commit_what_it_never_wrote(service: Service) -> None:
    connection = service.connect(local=False, host="10.0.0.1")
    welcome_of(connection, "a")
    space = open_space(connection, "a")
    body = wire.Reserve(namespace=space, keys=Chunks(namespace(), 1, "a").packed)
    assert "publish by Store" in refusal(connection, body)


def test_data_workers_are_named_by_the_address_that_the_client_knows(service: Service) -> None:
    service.domains["shared"].endpoints += [DataEndpoint("unix:/d", 7), DataEndpoint("unix:/e", 8)]

    def addresses(**where: object) -> set[str]:
        connections = [service.connect(**where) for _ in range(2)]  # type: ignore[arg-type]
        return {welcome_of(connection, "a").data_address for connection in connections}

    assert addresses(local=True) == {"unix:/d", "unix:/e"}
    assert addresses(local=False, host="10.0.0.1") == {"tcp://10.0.0.1:7", "tcp://10.0.0.1:8"}
    assert addresses(local=False, host="::1") == {"tcp://[::1]:7", "tcp://[::1]:8"}
    assert welcome_of(service.connect(local=True), "c").data_address == ""


def test_a_wrong_token_is_denied_and_leaves_no_session(service: Service) -> None:
    connection = service.connect(local=True)
    assert "wrong" in refusal(connection, hello("nobody", "test"))
    assert not connection.welcomed
    assert "Hello first" in refusal(connection, wire.Status())


def test_a_data_worker_maps_on_behalf_of_a_tenant_of_its_domain(service: Service) -> None:
    shared, apart = service.domains["shared"], service.domains["apart"]
    assert welcome_of(service.connect(local=True), "c", apart.secret).mapped
    connection = service.connect(local=True)
    assert "another domain" in refusal(connection, hello("c", "test", shared.secret))
    assert "wrong" in refusal(service.connect(local=True), hello("a", "test", b"guess"))
    remote = service.connect(local=False, host="h")
    assert "wrong" in refusal(remote, hello("a", "test", shared.secret))


def test_a_data_worker_needs_no_tenant_for_itself(service: Service) -> None:
    secret = service.domains["apart"].secret
    welcome = welcome_of(service.connect(local=True), secret.hex(), secret)
    assert (welcome.tenant, welcome.domain, welcome.mapped) == (INTERNAL_TENANT, "apart", True)
    assert "wrong" in refusal(service.connect(local=True), hello(secret.hex(), "test"))


def test_before_all_is_ready_only_the_daemon_itself_is_served(service: Service) -> None:
    service.health.starting = "7 of 9 bytes are there"
    secret = service.domains["shared"].secret
    assert "starting: 7 of 9" in refusal(service.connect(local=True), hello("a", "test"))
    assert welcome_of(service.connect(local=True), secret.hex(), secret).mapped
    assert service.state() == ("starting", ["7 of 9 bytes are there"])


def test_a_draining_daemon_refuses_new_leases_and_finishes_old_ones(service: Service) -> None:
    connection = service.connect(local=True)
    welcome_of(connection, "a")
    space, chunks = open_space(connection, "a"), Chunks(namespace(), 2, "a")
    reserved = ask(connection, wire.Reserve(namespace=space, keys=chunks.packed))
    assert isinstance(reserved, wire.Reserved)
    service.draining = True
    assert service.state() == ("draining", ["1 leases are held"])
    for body in (
        wire.Match(namespace=space, keys=chunks.packed),
        wire.Reserve(namespace=space, keys=chunks.packed),
    ):
        assert "draining" in refusal(connection, body)
    ask(connection, wire.Match(namespace=space, keys=chunks.packed, peek=True))
    verdict = ask(connection, wire.Commit(lease=reserved.lease))
    assert isinstance(verdict, wire.Verdict) and verdict.outcomes == b"\2\2"
    assert service.leases == 0


def test_an_attach_token_is_good_for_one_use(service: Service) -> None:
    connection = service.connect(local=True)
    welcome_of(connection, "a")
    attached = ask(connection, wire.Attach(writable=True))
    assert isinstance(attached, wire.Attached)
    ticket = service.redeem(attached.token)
    assert ticket.writable and ticket.domain.name == "shared" and connection.attached
    for token in (attached.token, b"", b"guess"):
        with pytest.raises(DeniedError):
            service.redeem(token)


def test_tokens_that_nobody_redeems_are_bounded(service: Service) -> None:
    domain = service.domains["shared"]
    tokens = [service.issue(domain, False) for _ in range(TICKETS_MAX + 1)]
    with pytest.raises(DeniedError):
        service.redeem(tokens[0])
    service.redeem(tokens[1])


def test_a_namespace_whose_digest_the_daemon_computes_differently_is_refused(
    service: Service,
) -> None:
    connection = service.connect(local=True)
    welcome_of(connection, "a")
    space = namespace()
    body = wire.Open(namespace=space.to_record(), digest=space.digest("b"))
    assert "digest" in refusal(connection, body)


def test_the_status_shows_a_tenant_only_its_own_namespaces(service: Service) -> None:
    for tenant in ("a", "b"):
        connection = service.connect(local=True)
        welcome_of(connection, tenant)
        open_space(connection, tenant)
    shared = service.domains["shared"]
    [mine] = service.status(shared, "a")["domains"]["shared"]["namespaces"]
    assert mine["tenant"] == "a" and mine["parts"][0]["planes"] == 2
    assert len(service.status()["domains"]["shared"]["namespaces"]) == 2


def test_a_request_that_fails_inside_is_an_error_and_the_session_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = service.connect(local=True)
    welcome_of(connection, "a")
    monkeypatch.setattr(connection.store, "renew", lambda *_: 1 / 0)
    assert "see its log" in refusal(connection, wire.Touch(lease=b"x" * 16))
    assert "ZeroDivisionError" in caplog.text
    assert service.counters.errors == {"InternalError": 1}
    ask(connection, wire.Status())


def test_a_one_way_request_gets_no_answer_even_if_it_fails(service: Service) -> None:
    connection = service.connect(local=True)
    welcome_of(connection, "a")
    frame = protocol.request_body(0, wire.Match(namespace=99, keys=b"x"))
    assert connection.handle(protocol.parse_request(frame)) is None
    assert service.counters.errors == {"DeniedError": 1}


def test_closing_gives_everything_back_even_after_the_store_was_renewed(service: Service) -> None:
    domain = service.domains["shared"]
    old = domain.store
    connection = service.connect(local=True)
    welcome_of(connection, "a")
    space, chunks = open_space(connection, "a"), Chunks(namespace(), 1, "a")
    ask(connection, wire.Reserve(namespace=space, keys=chunks.packed))
    domain.renew_store(counting_entropy())
    assert domain.store is not old and domain.pool.store is domain.store
    assert domain.store.capacity_bytes == old.capacity_bytes
    other = service.connect(local=True)
    welcome_of(other, "b")
    space_of_b, chunks_of_b = open_space(other, "b"), Chunks(namespace(), 1, "b")
    ask(other, wire.Reserve(namespace=space_of_b, keys=chunks_of_b.packed))
    connection.close()
    connection.close()
    assert (len(old.leases), len(domain.store.leases)) == (0, 1)
    other.close()
    assert not service.leases and not service.connections


def test_the_embedded_service_is_mapped_and_needs_no_token() -> None:
    service = embedded_service(MIB)
    welcome = welcome_of(service.connect(local=True), "")
    assert (welcome.tenant, welcome.domain, welcome.mapped) == ("default", "local", True)
    service.domains["local"].pool.close()
