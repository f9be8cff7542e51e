"""Where a daemon's settings come from, which are refused, and who may use it."""

import hmac
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import main
from kvpool.proto.errors import ConfigError, DeniedError
from kvpool.store.accounts import Limits
from kvpool.store.config import ServeConfig, default_socket, load
from kvpool.store.tenants import Tenants, is_loopback, load_tenants
from kvpool.store.values import parse_size

TOKEN_A, TOKEN_B, TOKEN_HTTP = "a" * 32, "b" * 32, "h" * 32
TENANTS = f"""
[tenants.a]
token = "{TOKEN_A}"
domain = "shared"
[tenants.b]
token = "{TOKEN_B}"
domain = "apart"
map = false
[domains.shared]
capacity = "64MiB"
[domains.apart]
capacity = "32MiB"
[http]
token = "{TOKEN_HTTP}"
"""


LIMITED = f"""
[tenants.a]
token = "{TOKEN_A}"
domain = "x"
reserve = "{{reserve}}"
quota = "{{quota}}"
"""


def tenants_of(tmp_path: Path, text: str, **settings: Any) -> Tenants:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return load_tenants(load({"tenants": str(path), **settings}, environ={}).config)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("10GiB", 10 << 30),
        ("512MiB", 512 << 20),
        ("1.5 gib", 3 << 29),
        ("10GB", 10**10),
        ("1e9", 10**9),
        ("12345678901234567", 12345678901234567),
        (4096, 4096),
        ("7B", 7),
    ],
)
def test_a_size_is_read_in_each_accepted_form(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["10G", "-1", "", "GiB", "ten", "1e999", "nan", True, "1 2"])
def test_what_is_no_size_is_refused_with_the_accepted_forms(text: Any) -> None:
    with pytest.raises(ConfigError, match="is no size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(
    tmp_path: Path,
) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('capacity = "1GiB"\nlease_s = 5\ndrain_s = 7.5\ninsecure = true\n')
    environ = {"KVPOOL_CAPACITY": "2GiB", "KVPOOL_LEASE_S": "6", "KVPOOL_CONFIG": str(file)}
    settings = load({"capacity": "3GiB"}, environ=environ)
    shown = settings.effective()
    assert shown["capacity"] == {"value": 3 << 30, "origin": "flag --capacity"}
    assert shown["lease_s"] == {"value": 6.0, "origin": "environment KVPOOL_LEASE_S"}
    assert shown["drain_s"] == {"value": 7.5, "origin": f"file {file}"}
    assert shown["insecure"]["value"] is True
    assert shown["policy"] == {"value": "phz", "origin": "default"}


def test_an_unknown_key_in_the_file_is_refused_with_what_was_probably_meant(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text("capasity = 1\n")
    with pytest.raises(ConfigError, match=r"'capasity' in .*kvpool.toml; did you mean 'capacity'"):
        load(path=str(file), environ={})


def test_an_unknown_variable_is_refused_with_what_was_probably_meant() -> None:
    with pytest.raises(ConfigError, match=r"'KVPOOL_LEASE' .* did you mean 'KVPOOL_LEASE_S'"):
        load(environ={"KVPOOL_LEASE": "3"})


def test_variables_of_the_clients_commands_are_left_alone() -> None:
    assert load(environ={"KVPOOL_TOKEN": "x", "KVPOOL_ADDRESS": "y"}).config.capacity == 1 << 30


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("capacity", "1KiB", "below the minimum"),
        ("policy", "best", "none of lru, s3fifo, phz"),
        ("policy", "belady", "knows the future"),
        ("lease_s", "0", "expire at once"),
        ("lease_s", "soon", "seconds"),
        ("drain_s", "-1", "seconds"),
        ("tcp", "7070", "HOST:PORT"),
        ("http", "[::1]", "HOST:PORT"),
        ("data_workers", "0", "1 to 16"),
        ("data_workers", "1.5", "no number"),
        ("insecure", "perhaps", "neither true nor false"),
        ("log_level", "loud", "debug"),
    ],
)
def test_an_impossible_value_is_refused_and_named(key: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load(environ={f"KVPOOL_{key.upper()}": value})
    assert key in str(caught.value)


def test_every_setting_says_what_it_is_for_and_has_a_default() -> None:
    for name in load(environ={}).effective():
        field = ServeConfig.__dataclass_fields__[name]
        assert len(field.metadata["help"]) > 20, name


def test_the_default_socket_is_in_a_private_folder() -> None:
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/1"}) == "/run/user/1/kvpool/kvpool.sock"
    assert default_socket({"HOME": "/home/x"}) == "/home/x/.cache/kvpool/kvpool.sock"


def test_a_file_that_is_missing_or_no_toml_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
        load(path=str(tmp_path / "nowhere"), environ={})
    (tmp_path / "bad").write_text("= 3")
    with pytest.raises(ConfigError, match="bad is no TOML"):
        load(path=str(tmp_path / "bad"), environ={})


def test_config_show_prints_values_with_their_origins(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "show", "--json", "--capacity", "2GiB", "--no-populate"])
    assert not ended.value.code
    shown = json.loads(capsys.readouterr().out)
    assert shown["capacity"] == {"value": 2 << 30, "origin": "flag --capacity"}
    assert shown["populate"] == {"value": False, "origin": "flag --populate"}


def test_errors_of_the_command_line_are_json_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "show", "--json", "--capacity", "2G"])
    assert ended.value.code == 2
    error = json.loads(capsys.readouterr().err)
    assert error["error"] == "ConfigError" and error["fault"] == "yours"


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    tenants = load_tenants(load(environ={}).config)
    identity = tenants.authenticate("", True)
    assert (identity.tenant, identity.domain, identity.mapped) == ("default", "local", True)
    assert tenants.domains == {"local": 1 << 30}


@pytest.mark.parametrize("key", ["tcp", "http"])
@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "[::]", "example.org"])
def test_an_address_for_other_machines_without_tokens_is_refused(key: str, host: str) -> None:
    config = load({key: f"{host}:1"}, environ={}).config
    with pytest.raises(ConfigError, match=r"--tenants PATH.*--insecure"):
        load_tenants(config)


def test_an_address_for_other_machines_is_served_when_told_to_be_insecure() -> None:
    load_tenants(load({"tcp": "0.0.0.0:1", "insecure": True}, environ={}).config)


def test_loopback_needs_no_token() -> None:
    load_tenants(load({"tcp": "127.0.0.1:1", "http": "[::1]:2"}, environ={}).config)
    assert is_loopback("localhost") and not is_loopback("localhost.example.org")


def test_the_tenant_comes_from_the_token(tmp_path: Path) -> None:
    tenants = tenants_of(tmp_path, TENANTS)
    assert tenants.authenticate(TOKEN_A, True).tenant == "a"
    assert not tenants.authenticate(TOKEN_B, False).mapped
    assert tenants.domains == {"shared": 64 << 20, "apart": 32 << 20}
    assert tenants.needs_streams == {"apart"}


@pytest.mark.parametrize("token", ["", "wrong", TOKEN_A[:-1], TOKEN_A + "a", TOKEN_HTTP])
def test_with_a_file_a_right_token_is_always_required(tmp_path: Path, token: str) -> None:
    with pytest.raises(DeniedError):
        tenants_of(tmp_path, TENANTS).authenticate(token, True)


def test_every_tenant_is_compared_whichever_token_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = tenants_of(tmp_path, TENANTS)
    seen: list[bytes] = []
    compare = hmac.compare_digest

    def compare_and_note(a: bytes, b: bytes) -> bool:
        seen.append(a)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare_and_note)
    tenants.authenticate(TOKEN_A, True)
    assert len(seen) == 2 and all(len(digest) == 32 for digest in seen)


def test_metrics_have_a_token_of_their_own(tmp_path: Path) -> None:
    tenants = tenants_of(tmp_path, TENANTS, http="127.0.0.1:1")
    assert tenants.allows_http(TOKEN_HTTP)
    assert not tenants.allows_http(TOKEN_A) and not tenants.allows_http("")
    without = TENANTS[: TENANTS.index("[http]")]
    with pytest.raises(ConfigError, match="metrics needs a token"):
        tenants_of(tmp_path, without, http="127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nobody could use"),
        ("[tenant.a]", "did you mean 'tenants'"),
        ('[tenants.a]\ndomain = "x"', "needs token"),
        ('[tenants.a]\ntoken = "t"\ndomain = "x"\nmapp = true', "did you mean 'map'"),
        ('[tenants.".internal"]\ntoken = "t"\ndomain = "x"', "is no name"),
        (TENANTS.replace(TOKEN_B, TOKEN_A), "the same token"),
        (TENANTS.replace("domains.apart", "domains.appart"), "did you mean 'appart'"),
        (TENANTS.replace(TOKEN_HTTP, TOKEN_A), "also a tenant's"),
        (TENANTS.replace("map = false", "map = 0"), "neither true nor false"),
        (LIMITED.format(reserve="2GiB", quota="1GiB"), "beyond its quota"),
        (LIMITED.format(reserve="0", quota="0"), "for none, leave it out"),
        (LIMITED.format(reserve="2GiB", quota="3GiB"), "reserve 2147483648 bytes of 1073741824"),
    ],
)
def test_a_tenants_file_that_cannot_be_meant_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        tenants_of(tmp_path, text)


def test_reserve_and_quota_are_bytes_of_the_tenants_domain(tmp_path: Path) -> None:
    tenants = tenants_of(tmp_path, LIMITED.format(reserve="256MiB", quota="0.5GiB"))
    assert tenants.limits_of("x") == {"a": Limits(reserve=1 << 28, quota=1 << 29)}
    assert tenants.limits_of("y") == {}


def test_a_single_domain_gets_the_capacity_of_the_daemon(tmp_path: Path) -> None:
    text = f'[tenants.a]\ntoken = "{TOKEN_A}"\ndomain = "x"\n'
    assert tenants_of(tmp_path, text, capacity="2GiB").domains == {"x": 2 << 30}
