"""Plans and reports as aligned text in a terminal and as a small table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = [
    "Row",
    "bytes_text",
    "count_text",
    "duration_text",
    "html_table",
    "seconds_text",
    "sides_text",
    "text_table",
]

Row = tuple[str, str]


def text_table(title: str, rows: Sequence[Row]) -> str:
    """Title and rows as aligned lines.

    >>> print(text_table("Plan", [("halo", "8 px"), ("tile", "64 px")]))
    Plan
      halo  8 px
      tile  64 px
    """
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def html_table(title: str, rows: Sequence[Row]) -> str:
    """Title and rows as an HTML table."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return (
        f"<table><caption style='text-align:left;font-weight:bold'>{html.escape(title)}</caption>"
        f"<tbody>{cells}</tbody></table>"
    )


def sides_text(sides: tuple[int, int]) -> str:
    """``(y, x)`` as one number where they are equal.

    >>> sides_text((64, 64)), sides_text((64, 32))
    ('64', '64 x 32')
    """
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]} x {sides[1]}"


def bytes_text(number: float) -> str:
    """Bytes in the decimal unit that suits.

    >>> bytes_text(950), bytes_text(2_400_000), bytes_text(3.2e9)
    ('950 B', '2.4 MB', '3.2 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def seconds_text(seconds: float) -> str:
    """A duration in the unit that suits.

    >>> seconds_text(0.0000123), seconds_text(0.0345), seconds_text(12.3)
    ('12 us', '34 ms', '12.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else f"{seconds * 1e6:.0f} us"


def duration_text(seconds: float) -> str:
    """A time to wait for, no finer than is of use.

    >>> duration_text(7.2), duration_text(200), duration_text(8000), duration_text(200_000)
    ('7 s', '3 min 20 s', '2 h 13 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    large, name, small, other = next(unit for unit in units if whole >= unit[0])
    return f"{whole // large} {name} {whole % large // small} {other}"


def count_text(number: int) -> str:
    """A count with its thousands set apart.

    >>> count_text(20000)
    '20 000'
    """
    return f"{number:,}".replace(",", " ")
