"""docs/modules.md, the map with one line per module, agrees with the tree."""

import re
from collections import Counter
from pathlib import Path

import floors

REPOSITORY = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"- `(?P<path>\S+\.py)` — \S.*")


def test_the_map_lists_each_module_once_with_a_line() -> None:
    text = (REPOSITORY / "docs/modules.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    matches = {line: ENTRY.fullmatch(line) for line in lines}
    listed = Counter(match["path"] for match in map(ENTRY.fullmatch, lines) if match)
    modules = {
        path.relative_to(REPOSITORY).as_posix()
        for root in floors.SOURCE_ROOTS
        for path in (REPOSITORY / root).rglob("*.py")
        if path.name != "__init__.py" and not path.name.endswith("_pb2.py")
    }
    problems = [
        *(f"not `- \\`path\\` — one line`: {line}" for line, match in matches.items() if not match),
        *(f"missing: {path}" for path in sorted(modules - listed.keys())),
        *(f"listed but not in the tree: {path}" for path in sorted(listed.keys() - modules)),
        *(f"listed {count} times: {path}" for path, count in listed.items() if count > 1),
    ]
    assert not problems, "\n".join(["docs/modules.md:", *problems])
