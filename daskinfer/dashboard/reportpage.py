"""A report as one HTML file: what the table says, and the map, stages and failures as pictures."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import display
from ..spans import StageTimes
from .html import card, chunk_picture, failures, legend

if TYPE_CHECKING:
    from ..report import Report

__all__ = ["report_page"]

_STYLE = """
body { font-family: system-ui, sans-serif; color: #222; max-width: 980px; margin: 24px auto;
       padding: 0 16px; line-height: 1.4 }
h1 { font-size: 22px; margin-bottom: 4px } h2 { font-size: 16px; margin: 26px 0 6px }
table { border-collapse: collapse; font-size: 13px } caption { display: none }
th, td { text-align: left; padding: 2px 16px 2px 0; vertical-align: top }
.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { background: #2f6db5; height: 10px } .track { width: 220px }
"""
_STAGES = ("stage", "share of all", "", "total", "median", "p95", "p99", "number")


def report_page(report: Report) -> str:
    """The whole file.

    Parameters
    ----------
    report : Report

    Returns
    -------
    str
        HTML; pictures are in it.
    """
    name = html.escape(report.output)
    state = "complete" if report.complete else "INCOMPLETE"
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{name} - daskinfer report</title><style>{_STYLE}</style></head><body>"
        f"<h1>{name}</h1><div>daskinfer report: {state}</div>"
        f"{_figures(report)}{_diagnosis(report)}{_map(report)}{_stages(report.stages)}"
        f"{_failures(report)}<h2>All of it</h2>{report._repr_html_()}</body></html>\n"
    )


def _figures(report: Report) -> str:
    count = display.count_text
    (height, width), whole = report.shape, report.busy_whole
    size = display.bytes_text(report.file_bytes)
    resumed = f"{count(report.resumed)} from an earlier run"
    return "<div style='margin-top:10px'>" + "".join(
        (
            card("pixels", f"{count(height)} x {count(width)}", size),
            card("time", display.duration_text(report.seconds), f"{report.seconds:.1f} s"),
            card("speed", f"{report.speed:.2f} Mpx/s", f"{count(report.tiles)} tiles"),
            card("device busy", f"{report.device_busy:.1%}", f"of the whole {whole:.1%}"),
            card("batches", f"{report.batch_fill:.0%} full", report.load.device),
            card("queue", f"{report.queue_depth:.1f} tiles", "waiting per batch"),
            card("chunks", count(report.chunks), resumed),
            card("retries", count(report.retries)),
            card("failed", count(len(report.failures)), "chunks"),
        )
    ) + "</div>"  # fmt: skip


def _diagnosis(report: Report) -> str:
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.diagnosis)
    return f"<h2>What limited it</h2><ul>{notes}</ul>" if notes else ""


def _map(report: Report) -> str:
    if report.chunk_map is None:
        return ""
    picture = chunk_picture(report.chunk_map, 360)
    return f"<h2>Chunks</h2>{picture}{legend(report.chunk_map.counts)}"


def _stages(stages: Mapping[str, StageTimes]) -> str:
    if not stages:
        return ""
    total = sum(times.total for times in stages.values()) or 1.0
    head = "".join(f"<th>{name}</th>" for name in _STAGES)
    rows = "".join(_stage(name, times, times.total / total) for name, times in stages.items())
    return (
        "<h2>Time per stage</h2><div style='font-size:12px;color:#666'>Summed over all threads, "
        f"which work at the same time.</div><table><tr>{head}</tr>{rows}</table>"
    )


def _stage(name: str, times: StageTimes, share: float) -> str:
    seconds = (times.total, *(times.quantile(part) for part in (0.5, 0.95, 0.99)))
    texts = [display.seconds_text(value) for value in seconds]
    cells = "".join(f"<td class='number'>{text}</td>" for text in texts)
    return (
        f"<tr><td>{name}</td><td class='number'>{share:.1%}</td>"
        f"<td><div class='track'><div class='bar' style='width:{share:.1%}'></div></div></td>"
        f"{cells}<td class='number'>{display.count_text(times.count)}</td></tr>"
    )


def _failures(report: Report) -> str:
    table = failures(report.failures, len(report.failures))
    return f"<h2>Failed</h2>{table}" if table else ""
