"""What users install: the same modules by every road, one namespace, and no harm to others.

One throw-away environment serves all tests of the file. Its fixtures build on each other (plain
install, then google-cloud-bigtable beside it, then an editable install instead) and only collect
evidence; the tests judge it. They need the package index.
"""

import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import floors
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = [f"kvpool.{floor}" for floor in floors.FLOORS if floor != "examples"]
SECONDS_PER_COMMAND_MAX = 600  # a slow index with empty caches; usually a few seconds
# Names that our source roots and floors would take if they were installed at top level.
TOP_LEVEL_NAMES = ["proto", "transfer", "kvstore", "store", "client", "cli", "bench"]

PROBE = """
import importlib, importlib.metadata, importlib.util, json, sys
packages, names = json.loads(sys.argv[1])
print(json.dumps({
    "imported": {name: importlib.import_module(name).__file__ for name in packages},
    "top_level": [name for name in names if importlib.util.find_spec(name)],
    "torch": "torch" in sys.modules,
    "distributions": sorted(d.name.lower() for d in importlib.metadata.distributions()),
    "scripts": {s.name: s.value for s in importlib.metadata.entry_points(group="console_scripts")},
    "modules": sorted(
        str(path) for path in importlib.metadata.files("kvpool") if str(path).endswith(".py")
    ),
}))
"""
PROBE_PROTO_PLUS = """
import proto
from google.cloud import bigtable
print(proto.__file__, proto.Message.__module__, bigtable.Client.__module__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command to success and return its standard output."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS_PER_COMMAND_MAX,
        check=False,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def modules_of_wheel(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if name.endswith(".py"))


def modules_of_tree() -> list[str]:
    return sorted(
        path.relative_to(REPOSITORY / root).as_posix()
        for root in floors.SOURCE_ROOTS
        for path in (REPOSITORY / root).rglob("*.py")
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """An empty environment that pip fills from outside."""

    python: Path
    folder: Path

    def install(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        run(*pip, "--only-binary=:all:", *arguments, cwd=REPOSITORY)

    def probe(self) -> dict[str, object]:
        question = json.dumps([PACKAGES, TOP_LEVEL_NAMES])
        answer = run(self.python, "-E", "-W", "error", "-c", PROBE, question, cwd=self.folder)
        evidence: dict[str, object] = json.loads(answer)
        return evidence


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    return Environment(folder / "venv/bin/python", folder)


@pytest.fixture(scope="module")
def plain(environment: Environment) -> dict[str, object]:
    """Evidence from `pip install .` with wheels only: nothing but kvpool itself is built."""
    environment.install("-c", "constraints.txt", ".")
    return environment.probe()


@pytest.fixture(scope="module")
def beside_bigtable(environment: Environment, plain: dict[str, object]) -> Environment:
    """The environment with kvpool installed first, google-cloud-bigtable second."""
    environment.install("google-cloud-bigtable")
    return environment


@pytest.fixture(scope="module")
def proto_plus_beside_a_plain_install(beside_bigtable: Environment) -> str:
    return run(beside_bigtable.python, "-E", "-c", PROBE_PROTO_PLUS, cwd=beside_bigtable.folder)


@pytest.fixture(scope="module")
def editable(
    beside_bigtable: Environment, proto_plus_beside_a_plain_install: str
) -> dict[str, object]:
    """Evidence from `pip install -e .`, made last because it replaces the plain install."""
    beside_bigtable.install("--no-deps", "-e", ".")
    return beside_bigtable.probe()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and, under direct/ and from-sdist/, the wheels of tree and sdist."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    run(*build, folder / "direct", "--wheel", cwd=REPOSITORY)
    run(*build, folder, "--sdist", cwd=REPOSITORY)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [source] = (folder / "unpacked").iterdir()
    run(*build, folder / "from-sdist", "--wheel", cwd=source)
    return folder


def test_a_wheel_holds_the_modules_of_the_tree_directly_and_by_way_of_an_sdist(
    built: Path,
) -> None:
    [direct] = (built / "direct").glob("*.whl")
    [from_sdist] = (built / "from-sdist").glob("*.whl")
    assert modules_of_wheel(direct) == modules_of_tree()
    assert modules_of_wheel(from_sdist) == modules_of_tree()


def test_a_wheel_has_one_namespace_and_nothing_else_at_top_level(built: Path) -> None:
    [wheel] = (built / "direct").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "kvpool/__init__.py" not in names
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"kvpool"}


def test_a_plain_install_imports_from_outside_the_tree(plain: dict[str, object]) -> None:
    imported = plain["imported"]
    assert isinstance(imported, dict)
    assert list(imported) == PACKAGES
    assert not any(str(file).startswith(f"{REPOSITORY}/") for file in imported.values())
    assert plain["modules"] == modules_of_tree()
    assert plain["top_level"] == []


def test_a_plain_install_has_the_command_and_no_torch(plain: dict[str, object]) -> None:
    scripts, distributions = plain["scripts"], plain["distributions"]
    assert isinstance(scripts, dict)
    assert isinstance(distributions, list)
    assert scripts["kvpool"] == "kvpool.cli:main"
    assert "torch" not in distributions
    assert plain["torch"] is False


def test_an_editable_install_imports_from_the_tree(editable: dict[str, object]) -> None:
    imported = editable["imported"]
    assert isinstance(imported, dict)
    assert list(imported) == PACKAGES
    assert all(str(file).startswith(f"{REPOSITORY}/") for file in imported.values())


def test_proto_plus_is_unharmed_by_a_plain_install(
    proto_plus_beside_a_plain_install: str,
) -> None:
    assert "site-packages/proto/" in proto_plus_beside_a_plain_install


def test_proto_plus_is_unharmed_by_an_editable_install_even_inside_the_tree(
    beside_bigtable: Environment, editable: dict[str, object]
) -> None:
    output = run(beside_bigtable.python, "-E", "-c", PROBE_PROTO_PLUS, cwd=REPOSITORY)
    assert "site-packages/proto/" in output
