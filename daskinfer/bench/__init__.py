"""Benchmarks that anyone can repeat: ``daskinfer bench feed | cpu | batch``."""
