"""The floors of the real tree hold, and the checker catches each kind of breach."""

from pathlib import Path

import floors
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
STORE = "kvstore/kvpool/store/index.py"
LOCAL = "client/kvpool/client/local.py"


def findings(tree: Path, path: str, source: str, **allowed: set[str]) -> list[str]:
    """What the checker says of a tree in which `path` is the only file."""
    file = tree / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    nowhere = dict.fromkeys(floors.ALLOWED, frozenset[str]())  # the real tree's files are not there
    rules = {**nowhere, **{name: frozenset(paths) for name, paths in allowed.items()}}
    return [str(finding) for finding in floors.check(tree, rules)]


def test_the_real_tree_has_no_finding() -> None:
    broken = floors.check(REPOSITORY)
    assert not broken, "\n".join(["broken rules:", *map(str, broken)])


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("proto/kvpool/proto/keys.py", "import kvpool.proto.layout"),
        ("transfer/kvpool/transfer/shm.py", "from kvpool.proto import layout"),
        (STORE, "from kvpool.transfer.base import Transport\nfrom .tiers import dram"),
        ("client/kvpool/client/session.py", "from kvpool import proto, transfer"),
        (LOCAL, "def connect():\n    from kvpool.store import Store"),
        (LOCAL, "async def connect():\n    import kvpool.store"),
        ("client/kvpool/cli/serve.py", "from kvpool.proto import errors"),
        ("client/kvpool/cli/serve.py", "def run():\n    import kvpool.store, kvpool.bench"),
        ("client/kvpool/cli/serve.py", "if TYPE_CHECKING:\n    import kvpool.store"),
        ("bench/kvpool/bench/replay.py", "import kvpool.store, kvpool.client, kvpool.transfer"),
        ("examples/first.py", "from kvpool.client import connect"),
        ("proto/kvpool/proto/keys.py", "import struct\nimport numpy as np"),
    ],
)
def test_imports_that_point_downwards_pass(tmp_path: Path, path: str, source: str) -> None:
    assert findings(tmp_path, path, source) == []


@pytest.mark.parametrize(
    ("path", "source", "target"),
    [
        ("proto/kvpool/proto/keys.py", "import kvpool.transfer", "kvpool.transfer"),
        ("transfer/kvpool/transfer/shm.py", "from kvpool.store import x", "kvpool.store"),
        ("transfer/kvpool/transfer/shm.py", "from kvpool import store", "kvpool.store"),
        ("transfer/kvpool/transfer/shm.py", "from ..client import x", "kvpool.client"),
        ("transfer/kvpool/transfer/shm.py", "from .. import client", "kvpool.client"),
        ("transfer/kvpool/transfer/a/b.py", "from ...store.c import x", "kvpool.store.c"),
        (STORE, "import kvpool.client.session as s", "kvpool.client.session"),
        (STORE, "def f():\n    import kvpool.client", "kvpool.client"),
        (STORE, "if TYPE_CHECKING:\n    import kvpool.client", "kvpool.client"),
        (STORE, "importlib.import_module('kvpool.client')", "kvpool.client"),
        (STORE, "__import__('kvpool.client')", "kvpool.client"),
        (STORE, "import kvpool.nowhere", "kvpool.nowhere"),
        ("client/kvpool/client/session.py", "import kvpool.store", "kvpool.store"),
        ("client/kvpool/client/session.py", "def f():\n    import kvpool.store", "kvpool.store"),
        ("client/kvpool/client/session.py", "import kvpool.cli", "kvpool.cli"),
        ("bench/kvpool/bench/replay.py", "import kvpool.cli", "kvpool.cli"),
        ("examples/first.py", "import kvpool.cli", "kvpool.cli"),
    ],
)
def test_an_import_that_points_upwards_or_sideways_is_found(
    tmp_path: Path, path: str, source: str, target: str
) -> None:
    [finding] = findings(tmp_path, path, source)
    assert finding.startswith(f"{path}:{source.count(chr(10)) + 1}: ")
    assert finding.endswith(f" may not import {target}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (LOCAL, "import kvpool.store"),
        (LOCAL, "class Local:\n    import kvpool.store"),
        ("client/kvpool/cli/serve.py", "import kvpool.store"),
        ("client/kvpool/cli/serve.py", "from kvpool.client import connect"),
        (
            "client/kvpool/cli/serve.py",
            "if TYPE_CHECKING:\n    pass\nelse:\n    import kvpool.store",
        ),
    ],
)
def test_a_lazy_exception_is_not_one_at_import_time(tmp_path: Path, path: str, source: str) -> None:
    [finding] = findings(tmp_path, path, source)
    assert finding.endswith(" only lazily")


@pytest.mark.parametrize("module", ["lmdb", "redis", "pickle", "marshal", "shelve", "yaml"])
def test_a_restricted_module_is_found_outside_its_allow_list(tmp_path: Path, module: str) -> None:
    [finding] = findings(tmp_path, STORE, f"def f():\n    from {module}.part import x")
    assert finding == f"{STORE}:2: {module} may be imported only by: no file"


def test_a_restricted_module_passes_in_a_listed_file(tmp_path: Path) -> None:
    assert findings(tmp_path, STORE, "import redis", redis={STORE}) == []


def test_torch_is_found_in_a_file_that_is_not_listed(tmp_path: Path) -> None:
    [finding] = findings(tmp_path, STORE, "def f():\n    import torch.cuda")
    assert finding == f"{STORE}:2: torch may be imported only by: no file"


def test_torch_is_found_at_import_time_even_in_a_listed_file(tmp_path: Path) -> None:
    [finding] = findings(tmp_path, STORE, "import torch", torch={STORE})
    assert finding == f"{STORE}:1: torch may be imported only lazily"


def test_torch_passes_lazily_in_a_listed_file(tmp_path: Path) -> None:
    assert findings(tmp_path, STORE, "def f():\n    import torch", torch={STORE}) == []


def test_a_listed_file_that_does_not_exist_is_found(tmp_path: Path) -> None:
    [finding] = findings(tmp_path, STORE, "", torch={LOCAL})
    assert finding == f"{LOCAL}:0: allow-listed for torch but does not exist"


@pytest.mark.parametrize("call", ["eval", "exec", "torch.load"])
def test_a_call_that_runs_code_from_data_is_found(tmp_path: Path, call: str) -> None:
    [finding] = findings(tmp_path, STORE, f"def f(data):\n    return {call}(data)")
    assert finding == f"{STORE}:2: {call} runs code from data"


@pytest.mark.parametrize(
    "path", ["proto/__init__.py", "tests/__init__.py", "client/kvpool/__init__.py"]
)
def test_an_init_file_that_breaks_the_namespace_is_found(tmp_path: Path, path: str) -> None:
    [finding] = findings(tmp_path, path, "")
    assert finding == f"{path}:1: an __init__.py here breaks the namespace"


@pytest.mark.parametrize(
    "path", ["proto/keys.py", "proto/kvpool/keys.py", "proto/kvpool/store/a.py"]
)
def test_a_module_outside_the_folders_of_the_floors_is_found(tmp_path: Path, path: str) -> None:
    [finding] = findings(tmp_path, path, "")
    assert finding == f"{path}:1: a module outside the folders of the floors"
