"""What `kvpool demo` shows: a line of progress that is overwritten, lines that stay, a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kvpool.bench.demo import Report, Turn

_QUOTE = 240
"""Characters of a question or an answer that are shown."""


class View:
    """Writes to `console`, which may be quiet. Without a terminal only what stays is written."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def fetching(self) -> Iterator[Callable[[int, int], None]]:
        """Within it, call with the bytes so far and the bytes in all."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(
            *columns, TransferSpeedColumn(), console=self._console, transient=True
        ) as bar:
            task = bar.add_task("fetching a small model", visible=False)

            def advance(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, visible=True)

            yield advance

    @contextmanager
    def working(self, who: str, what: str) -> Iterator[Callable[[str], None]]:
        """Within it, call with the text that `who` is generating, to show its end."""
        with self._console.status(Text(f"{who}: {what}")) as status:

            def show(text: str) -> None:
                room = self._console.width - len(who) - 6
                words = " ".join(text.split())
                end = words if len(words) <= room else f"…{words[1 - room :]}"
                status.update(Text(f"{who}: {end}"))

            yield show

    def fell_back(self, why: str) -> None:
        self._print(f"{why}\n", style="yellow")
        self._print(
            "Going on with seeded random weights of the same shape: the text is noise, but the KV "
            "costs the same to compute, store and move.\n"
        )

    def turn_begins(self, number: int, turns: int, question: str, prompt_tokens: int) -> None:
        self._print(f"Turn {number} of {turns}, a prompt of {prompt_tokens:,} tokens", style="bold")
        self._quote("user", question)

    def turn_done(self, turn: Turn) -> None:
        self._quote("model", turn.answer)
        self._print(
            f"first token after {_ms(turn.ttft_without_s)} ms alone, {_ms(turn.ttft_with_s)} ms "
            f"with the store, {turn.reused_tokens:,} tokens reused\n",
            style="dim",
        )

    def done(self, report: Report) -> None:
        self._console.print(_table(report), "", sep="\n")
        for line in summary(report):
            self._print(line)

    def _quote(self, who: str, text: str) -> None:
        words = " ".join(text.split())
        shown = words if len(words) <= _QUOTE else f"{words[: _QUOTE - 1]}…"
        lines = textwrap.wrap(f"{who}: {shown}", self._console.width - 2)
        quote = Text(textwrap.indent("\n".join(lines), "  "))
        quote.stylize("cyan", 2, 3 + len(who))
        self._console.print(quote)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text), style=style)


def summary(report: Report) -> Iterator[str]:
    """The end, in sentences."""
    totals = report.totals
    saved = totals.ttft_without_s - totals.ttft_with_s
    yield (
        f"Waiting for first tokens took {totals.ttft_without_s:.1f} s without the store and "
        f"{totals.ttft_with_s:.1f} s with it"
        + (f": {saved:.1f} s of prefill saved." if saved > 0 else ".")
    )
    yield (
        f"{totals.reused_tokens:,} of {totals.prompt_tokens:,} prompt tokens "
        f"({totals.reused_tokens / totals.prompt_tokens:.0%}) came from earlier turns. "
        f"{totals.pulled_bytes / 1e6:,.0f} MB were pulled and verified"
        + (f" at {totals.pulled_bytes / totals.pull_s / 1e9:.1f} GB/s." if totals.pull_s else ".")
    )
    if totals.bit_equal and totals.tokens_identical:
        yield (
            f"All {totals.answer_tokens:,} generated tokens are identical both ways, and the "
            "logits of each first token are equal to the bit to those of a prefill of the whole "
            f"prompt, split at the same boundaries of {report.chunk_tokens} tokens."
        )
    yield f"Nothing is left running. All this took {report.seconds:.0f} s."


def _table(report: Report) -> Table:
    table = Table(
        title=f"{report.model} ({report.revision[:12]}), chunks of {report.chunk_tokens} tokens",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in (
        "turn",
        "prompt\ntokens",
        "tokens\nreused",
        "TTFT ms\nwithout",
        "TTFT ms\nwith",
        "faster",
        "tokens\nidentical",
        "MB\npulled",
        "GB/s",
        "tier",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for turn in report.turns:
        table.add_row(
            str(turn.number),
            f"{turn.prompt_tokens:,}",
            f"{turn.reused_tokens:,}",
            _ms(turn.ttft_without_s),
            _ms(turn.ttft_with_s),
            f"{turn.ttft_without_s / turn.ttft_with_s:.1f}×",
            "yes" if turn.tokens_identical else "NO",
            f"{turn.pulled_bytes / 1e6:.1f}",
            f"{turn.pull_gb_s:.1f}",
            turn.tier,
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}"
