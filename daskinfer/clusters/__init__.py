"""Start or reach Dask, and see to it that its workers are fit for inference."""

from __future__ import annotations

from .start import cluster

__all__ = ["cluster"]
