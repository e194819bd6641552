"""What a search for objects did."""

from __future__ import annotations

from dataclasses import dataclass, fields

from daskinfer import display
from daskinfer.report import Report

__all__ = ["ObjectReport"]


@dataclass(frozen=True, repr=False)
class ObjectReport(Report):
    """Result of `daskinfer.detect`: a `Report`, and how many objects there are.

    Attributes
    ----------
    counts : tuple of (str, int)
        Objects by class.
    """

    counts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, report: Report, counts: tuple[tuple[str, int], ...]) -> ObjectReport:
        """A report with numbers of objects."""
        known = {field.name: getattr(report, field.name) for field in fields(report)}
        return cls(**known, counts=counts)

    @property
    def objects(self) -> int:
        """How many there are in the output."""
        return sum(count for _, count in self.counts)

    def _rows(self) -> list[display.Row]:
        rows = [
            ("boxes lost", text.replace(" px became nodata", " without a place"))
            if name == "non-finite"
            else (name, text)
            for name, text in super()._rows()
        ]
        by_class = ", ".join(f"{name} {display.count_text(n)}" for name, n in self.counts)
        found = display.count_text(self.objects)
        return [rows[0], ("objects", f"{found} ({by_class})" if by_class else found), *rows[1:]]
