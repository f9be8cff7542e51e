#!/usr/bin/env python3
"""Check the tree's floors: an import points only downwards, and some modules stay out.

Pure syntax: files are parsed, never imported. The gate runs this file, and the tests hold it
against small made-up trees. Four things are checked:

- which floor of kvpool imports which, and whether at import time or only lazily;
- modules that only the files of an allow-list may import (torch only lazily, even there);
- calls that run code from data (`eval`, `exec`, `torch.load`), nowhere allowed;
- the layout: no `__init__.py` that would turn the shared `kvpool` namespace, or a source root, into
  a package of its own, and no module outside the folder of a floor.

An import is lazy if it stands inside a function or under `if TYPE_CHECKING:`.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FLOORS = {
    "proto": "proto/kvpool/proto",
    "transfer": "transfer/kvpool/transfer",
    "store": "kvstore/kvpool/store",
    "client": "client/kvpool/client",
    "cli": "client/kvpool/cli",
    "bench": "bench/kvpool/bench",
    "examples": "examples",
}
SOURCE_ROOTS = ("proto", "transfer", "kvstore", "client", "bench")

# What each floor may import besides itself.
BELOW = {
    "proto": frozenset[str](),
    "transfer": frozenset({"proto"}),
    "store": frozenset({"proto", "transfer"}),
    "client": frozenset({"proto", "transfer"}),
    "cli": frozenset({"proto"}),
    "bench": frozenset({"proto", "transfer", "store", "client"}),
    "examples": frozenset({"proto", "transfer", "store", "client"}),
}
# What a floor, or a single file, may import lazily on top of that.
BELOW_LAZILY = {
    "cli": frozenset({"transfer", "store", "client", "bench"}),
    "client/kvpool/client/local.py": frozenset({"store"}),
}

# Modules that only the listed files may import; an empty list forbids the module.
ALLOWED: Mapping[str, frozenset[str]] = {
    "torch": frozenset(
        {
            "bench/kvpool/bench/hf_engine.py",
            "bench/kvpool/bench/gguf_model.py",
            "client/kvpool/client/engines/hf.py",
            "client/kvpool/client/engines/sglang.py",
            "client/kvpool/client/engines/vllm/identity.py",
            "client/kvpool/client/engines/vllm/memory.py",
        }
    ),
    "vllm": frozenset(
        {
            "bench/kvpool/bench/vllm_engine.py",
            "client/kvpool/client/engines/vllm/connector.py",
            "client/kvpool/client/engines/vllm/tier.py",
        }
    ),
    "lmdb": frozenset({"kvstore/kvpool/store/ssd/lmdb_catalogue.py"}),
    "transformers": frozenset(
        {
            "bench/kvpool/bench/gguf_model.py",
            "bench/kvpool/bench/hf_engine.py",
            "client/kvpool/client/engines/hf.py",
        }
    ),
    "sglang": frozenset({"client/kvpool/client/engines/sglang.py"}),
    "redis": frozenset(),
    "pickle": frozenset(),
    "marshal": frozenset(),
    "shelve": frozenset(),
    "yaml": frozenset(),
}
ONLY_LAZILY = frozenset({"lmdb", "torch", "transformers"})
FORBIDDEN_CALLS = frozenset({"eval", "exec", "torch.load"})


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One broken rule: where, and which."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a file imports, by its absolute name."""

    module: str
    line: int
    lazy: bool


class _Reader(ast.NodeVisitor):
    """Collects the imports and the forbidden calls of one file."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.imports: list[Import] = []
        self.calls: list[tuple[str, int]] = []
        self._package = package
        self._lazy = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._package[: len(self._package) - node.level + 1] if node.level else ()
        module = ".".join((*base, *filter(None, [node.module])))
        if module == "kvpool":  # `from kvpool import store` names a floor, not an attribute
            for alias in node.names:
                self._add(f"kvpool.{alias.name}", node)
        else:
            self._add(module, node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS:
            self.calls.append((name, node.lineno))
        if name in {"__import__", "import_module", "importlib.import_module"} and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                self._add(argument.value, node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._lazy += 1
        self.generic_visit(node)
        self._lazy -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self.generic_visit(node)
            return
        self._lazy += 1
        for statement in node.body:
            self.visit(statement)
        self._lazy -= 1
        for statement in node.orelse:
            self.visit(statement)

    def _add(self, module: str, node: ast.stmt | ast.expr) -> None:
        self.imports.append(Import(module, node.lineno, self._lazy > 0))


def check(tree: Path, allowed: Mapping[str, frozenset[str]] = ALLOWED) -> list[Finding]:
    """Every broken rule in the repository at `tree`, sorted by file and line."""
    findings = list(_check_layout(tree))
    for floor, folder in FLOORS.items():
        for path in (tree / folder).rglob("*.py"):
            findings += _check_file(path, path.relative_to(tree).as_posix(), floor, allowed)
    for module, paths in allowed.items():
        for name in paths:
            if not (tree / name).is_file():
                findings.append(Finding(name, 0, f"allow-listed for {module} but does not exist"))
    return sorted(findings)


def _check_layout(tree: Path) -> Iterator[Finding]:
    for pattern in ("*/__init__.py", "*/kvpool/__init__.py"):
        for path in tree.glob(pattern):
            yield Finding(
                path.relative_to(tree).as_posix(), 1, "an __init__.py here breaks the namespace"
            )
    for root in SOURCE_ROOTS:
        for path in (tree / root).rglob("*.py"):
            name = path.relative_to(tree).as_posix()
            inside = any(name.startswith(f"{folder}/") for folder in FLOORS.values())
            if not inside and path.name != "__init__.py":
                yield Finding(name, 1, "a module outside the folders of the floors")


def _check_file(
    path: Path, name: str, floor: str, allowed: Mapping[str, frozenset[str]]
) -> Iterator[Finding]:
    parts = Path(name).parent.parts
    reader = _Reader(parts[parts.index("kvpool") :] if "kvpool" in parts else ())
    reader.visit(ast.parse(path.read_bytes(), filename=name))
    for call, line in reader.calls:
        yield Finding(name, line, f"{call} runs code from data")
    for found in reader.imports:
        top, _, rest = found.module.partition(".")
        if top == "kvpool":
            problem = _floor_problem(found, rest.partition(".")[0], floor, name)
        else:
            problem = _module_problem(found, top, name, allowed)
        if problem:
            yield Finding(name, found.line, problem)


def _floor_problem(found: Import, target: str, floor: str, name: str) -> str | None:
    if target == floor or target in BELOW[floor]:
        return None
    if target in BELOW_LAZILY.get(floor, ()) or target in BELOW_LAZILY.get(name, ()):
        return None if found.lazy else f"{floor} may import {found.module} only lazily"
    return f"{floor} may not import {found.module}"


def _module_problem(
    found: Import, top: str, name: str, allowed: Mapping[str, frozenset[str]]
) -> str | None:
    if top not in allowed:
        return None
    if name not in allowed[top]:
        return f"{top} may be imported only by: {', '.join(sorted(allowed[top])) or 'no file'}"
    if top in ONLY_LAZILY and not found.lazy:
        return f"{top} may be imported only lazily"
    return None


if __name__ == "__main__":
    broken = check(Path(__file__).resolve().parent.parent)
    for finding in broken:
        print(finding)
    sys.exit(1 if broken else 0)
