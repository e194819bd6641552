"""Seeing what a run does: a page on Dask's dashboard, Prometheus gauges, a widget, a saved report.

All of them show what `view.RunView` has learned from a run's events, and draw chunks with `states`.
"""
