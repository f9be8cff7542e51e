"""docs/faults.md is true: each row is answered by tests that exist, or says by what later."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LATER = {"SSD", "cluster", "engines", "transfer", "operations"}
ROW = re.compile(r"^\| ([A-Z]{2}-\d+) \| [^|]+ \| ([^|]+) \|$")


def rows() -> dict[str, str]:
    """Where each fault is answered, by its id."""
    lines = (REPOSITORY / "docs/faults.md").read_text().splitlines()
    matches = filter(None, map(ROW.match, lines))
    found = [(str(match[1]), str(match[2])) for match in matches]
    assert len(found) == len(dict(found)), "an id is listed twice"
    return dict(found)


def existing_tests() -> set[str]:
    sources = [path.read_text() for path in (REPOSITORY / "tests").rglob("*.py")]
    return {name for source in sources for name in re.findall(r"def (test_\w+)", source)}


def test_every_row_says_where_and_every_test_it_names_exists() -> None:
    existing = existing_tests()
    for fault, where in rows().items():
        for answer in where.split(";"):
            kind, _, names = answer.strip().partition(": ")
            listed = [name.strip() for name in names.split(",")]
            assert kind in ("here", "later"), f"{fault}: {answer!r}"
            missing = set(listed) - (existing if kind == "here" else LATER)
            assert not missing, f"{fault} names {', '.join(sorted(missing))}"


def test_no_kind_of_fault_is_left_out() -> None:
    kinds = {fault.partition("-")[0] for fault in rows()}
    assert kinds == {
        *("ID", "LY", "WB", "PX", "HY", "CW", "CR", "PN", "EV", "MM", "DK", "LM"),
        *("EL", "GR", "SM", "GP", "ST", "VS"),
    }
