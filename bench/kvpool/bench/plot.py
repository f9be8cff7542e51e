"""Line plots as SVG, without a plotting library: a file of text that a browser shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 130, 40, 50
_COLOURS = ("#888888", "#1b6ca8", "#d1495b", "#2e8b57", "#8e44ad", "#e08e0b", "#17becf")


def line_plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """SVG of lines over a logarithmic x axis (values > 0) and a y axis from 0."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    top = _round_up(max((y for points in lines.values() for _, y in points), default=1.0))
    low, high = math.log(xs[0]), math.log(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low) / ((high - low) or 1)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 22, title, "middle"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_label, "middle"),
        f'<g transform="rotate(-90)">{_text(-_HEIGHT / 2, 16, y_label, "middle")}</g>',
    ]
    for step in range(5):
        x, y = at(xs[0], top * step / 4)
        parts.append(_line([(x, y), (_WIDTH - _RIGHT, y)], "#dddddd", 1))
        parts.append(_text(x - 6, y + 4, f"{top * step / 4:g}", "end"))
    for value in xs:
        x, y = at(value, 0)
        parts.append(_text(x, y + 18, f"{value:g}", "middle"))
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(_line([at(x, y) for x, y in points], colour, 2))
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 18 * number + 12, name, "start", colour))
    return "\n".join([*parts, "</svg>", ""])


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 times a power of ten: its quarters are short numbers."""
    scale = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return scale * next(step for step in (1, 2, 4, 6, 8, 10) if value <= step * scale)


def _line(points: Points, colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "black") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
