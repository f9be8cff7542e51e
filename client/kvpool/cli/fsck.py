"""`kvpool fsck`: looks through the SSD tier of a daemon that is not running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.store import show, size

if TYPE_CHECKING:
    from kvpool.store.ssd.check import Finding, Report

EXIT_DAMAGED = 1


@click.command()
@click.argument("path")
@click.option("--list", "list_all", is_flag=True, help="Show every chunk, not only the damaged.")
@click.option("--repair", is_flag=True, help="Take what is damaged out of the catalogue.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def fsck(ctx: click.Context, path: str, list_all: bool, repair: bool, as_json: bool) -> None:
    """Compare every byte in the SSD folder PATH (ssd_path, or one domain's in it) with its sums.

    Exits with 1 if something is damaged and was not repaired. A daemon may use a damaged folder:
    what fails its sums is never served.
    """
    from kvpool.store.ssd.check import check_folder
    from kvpool.store.ssd.folder import IDENTITY

    inside = [one for one in sorted(Path(path).glob("*")) if (one / IDENTITY).is_file()]
    folders = [str(one) for one in inside] or [path]
    listed: list[Finding] = []
    reports = {
        folder: check_folder(
            folder, repair=repair, seen=listed.append if list_all else lambda finding: None
        )
        for folder in folders
    }
    value: dict[str, Any] = {folder: _as_json(report) for folder, report in reports.items()}
    if list_all:
        value["chunks"] = [_finding(one) for one in listed]
    show(as_json, value, lambda: [*_lines(reports), *map(_line, listed)])
    if any(len(report.damaged) > report.repaired for report in reports.values()):
        ctx.exit(EXIT_DAMAGED)


def _finding(finding: Finding) -> dict[str, Any]:
    return asdict(finding) | {"key": finding.key.hex()}


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "identity": asdict(report.identity),
        "namespaces": report.spaces,
        "chunks": report.chunks,
        "bytes": report.nbytes,
        "damaged": [_finding(one) for one in report.damaged],
        "repaired": report.repaired,
    }


def _lines(reports: dict[str, Report]) -> Iterator[str]:
    for folder, report in reports.items():
        yield (
            f"{folder}: {report.chunks} chunks of {size(report.nbytes)}, "
            f"{len(report.damaged)} damaged, {report.repaired} of them removed"
        )
        for space in report.spaces:
            yield f"  namespace {space['digest'][:16]} of tenant {space['tenant']} {space['wrong']}"
        yield from (f"  damaged: {_line(finding)}" for finding in report.damaged)


def _line(finding: Finding) -> str:
    state = finding.wrong or "intact"
    return f"{finding.key.hex()} {finding.namespace or '?'} {finding.nbytes} bytes: {state}"
