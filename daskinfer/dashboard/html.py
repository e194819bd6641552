"""Pieces of HTML that the page, the notebook widget and the saved report share.

Styles are inline: notebooks strip style sheets, and Bokeh puts each piece into a shadow of its own.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Protocol

from .. import display
from .states import COLORS, STATES, ChunkMap, data_url
from .view import Snapshot

__all__ = ["bar", "card", "chunk_picture", "failures", "legend", "numbers", "overview", "title"]

_FONT = "font-family:system-ui,sans-serif;color:#222"
_LINED = 48  # cells a side
# On a picture of the source: what is missing shades it, what is done tints it.
_OVER = (150, 120, 120, 235, 235, 120)


class _Failed(Protocol):
    """As in a ledger and on a page."""

    @property
    def chunk(self) -> int: ...
    @property
    def window(self) -> tuple[int, int, int, int]: ...
    @property
    def error(self) -> str: ...
    @property
    def worker(self) -> str: ...


def title(run: Snapshot) -> str:
    """What is written, and how it stands."""
    color = {"complete": "#2b8a4b", "incomplete": "#c0392b", "stopped": "#c0392b"}.get(
        run.state, "#2f6db5"
    )
    note = f" {html.escape(run.note)}" if run.note else ""
    return (
        f"<div style='{_FONT};font-size:16px;margin:2px 0 6px'>"
        f"<b>{html.escape(run.output)}</b> "
        f"<span style='background:{color};color:white;border-radius:3px;padding:1px 7px'>"
        f"{html.escape(run.state)}</span><span style='font-size:13px'>{note}</span></div>"
    )


def bar(run: Snapshot) -> str:
    """A bar as long as the part that is done, and in words."""
    count = display.count_text
    resumed = f", {count(run.resumed)} from an earlier run" if run.resumed else ""
    text = (
        f"{count(run.done)} of {count(run.chunks)} chunks{resumed}, "
        f"{'took' if run.ended else 'for'} {display.duration_text(run.seconds)}"
    )
    return (
        f"<div style='{_FONT};font-size:13px'>"
        "<div style='background:#e4e4e4;border-radius:3px;height:10px;overflow:hidden'>"
        f"<div style='background:#34a058;height:10px;width:{run.share:.2%}'></div></div>"
        f"<div style='margin-top:3px'>{text}</div></div>"
    )


def card(name: str, value: str, note: str = "") -> str:
    """A number with its name above it."""
    return (
        "<div style='display:inline-block;min-width:104px;margin:4px 18px 4px 0;"
        f"vertical-align:top;{_FONT}'>"
        f"<div style='font-size:11px;color:#666'>{html.escape(name)}</div>"
        f"<div style='font-size:19px;white-space:nowrap'>{html.escape(value)}</div>"
        f"<div style='font-size:11px;color:#666'>{html.escape(note)}</div></div>"
    )


def numbers(run: Snapshot) -> str:
    """The figures of a run as cards."""
    count = display.count_text
    left = "not known yet" if run.left is None else display.duration_text(run.left)
    return (
        "<div>"
        + "".join(
            (
                card("time left", "none" if run.ended else left),
                card("speed", f"{run.speed:.2f} Mpx/s", f"{count(run.tiles)} tiles"),
                card("device busy", f"{run.busy:.1%}", f"of the whole run {run.busy_whole:.1%}"),
                card("batches", f"{run.fill:.0%} full", run.device),
                card("queue", f"{run.queue:.1f} tiles", "waiting per batch"),
                card("retries", count(run.retries)),
                card("failed", count(run.failed), "chunks"),
            )
        )
        + "</div>"
    )


def legend(counts: Sequence[int]) -> str:
    """Colours of the states that there are, with the number of chunks in each."""
    squares = "".join(
        "<span style='margin-right:14px;white-space:nowrap'>"
        f"<span style='display:inline-block;width:11px;height:11px;margin-right:4px;"
        f"background:rgb{COLORS[state]}'></span>"
        f"{STATES[state]} {display.count_text(number)}</span>"
        for state, number in enumerate(counts)
        if number
    )
    return f"<div style='{_FONT};font-size:12px;line-height:1.7'>{squares}</div>"


def chunk_picture(chunk_map: ChunkMap, side: int, backdrop: bytes | None = None) -> str:
    """The chunk map, over a picture of the source where there is one.

    Parameters
    ----------
    chunk_map : ChunkMap
    side : int
        Of the longer side in CSS pixels.
    backdrop : bytes, optional
        A PNG.
    """
    rows, cols = chunk_map.shape
    scale = side / max(rows, cols)
    size = f"width:{max(1, cols * scale):.0f}px;height:{max(1, rows * scale):.0f}px"
    above = chunk_map.picture() if backdrop is None else chunk_map.picture(_OVER)
    under = "" if backdrop is None else _image(backdrop, f"position:absolute;{size}")
    over = _image(above, f"position:absolute;image-rendering:pixelated;{size}")
    lines = _grid(scale, size) if max(rows, cols) <= _LINED else ""
    return f"<div style='position:relative;{size}'>{under}{over}{lines}</div>"


def _grid(cell: float, size: str) -> str:
    """Thin lines between cells, where they are few enough to be told apart."""
    line = "rgba(255,255,255,.45) 1px,transparent 1px"
    return (
        f"<div style='position:absolute;left:0;top:0;{size};background-size:{cell:.3f}px "
        f"{cell:.3f}px;background-image:linear-gradient(to right,{line}),"
        f"linear-gradient(to bottom,{line})'></div>"
    )


def _image(picture: bytes, style: str) -> str:
    return f"<img alt='chunks' src='{data_url(picture)}' style='{style};left:0;top:0;margin:0'>"


def failures(chunks: Iterable[_Failed], total: int) -> str:
    """A table of failed chunks with their windows; nothing where none failed."""
    rows = "".join(
        f"<tr>{_cell(str(f.chunk))}{_cell(str(tuple(f.window)))}{_cell(f.worker)}{_cell(f.error)}</tr>"
        for f in chunks
    )
    if not rows:
        return ""
    names = "".join(
        f"<th style='text-align:left;padding:1px 12px 1px 0'>{name}</th>"
        for name in ("chunk", "(row, col, height, width)", "worker", "error")
    )
    return (
        f"<div style='{_FONT};font-size:12px;max-height:260px;overflow:auto'>"
        f"<b>{display.count_text(total)} failed chunks</b>"
        f"<table style='border-collapse:collapse'><tr>{names}</tr>{rows}</table></div>"
    )


def _cell(text: str) -> str:
    return f"<td style='padding:1px 12px 1px 0;vertical-align:top'>{html.escape(text)}</td>"


def overview(run: Snapshot, side: int = 220) -> str:
    """Bar, map and figures of a run together."""
    return (
        f"<div style='max-width:860px'>{title(run)}{bar(run)}"
        "<div style='display:flex;gap:20px;margin-top:8px;flex-wrap:wrap'>"
        f"<div>{chunk_picture(run.chunk_map, side)}{legend(run.chunk_map.counts)}</div>"
        f"<div style='flex:1;min-width:300px'>{numbers(run)}</div></div>"
        f"{failures(run.failures, run.failed)}</div>"
    )
