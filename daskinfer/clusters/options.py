"""Options of the command line that are about the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .spec import yaml_value

__all__ = ["cluster_options"]

_HOW_MANY = {"cuda": "devices", "slurm": "jobs"}


def cluster_options(kind: str, workers: int | None, words: Sequence[str]) -> dict[str, Any]:
    """Keywords of `daskinfer.cluster` from options of the command line.

    Parameters
    ----------
    kind : str
    workers : int or None
        From ``--workers``, which is called otherwise where a worker is a device or a job.
    words : sequence of str
        ``NAME=VALUE``, values as in YAML.

    Examples
    --------
    >>> cluster_options("slurm", 4, ["gpus=1", "queue=long", "walltime=12:00:00"])
    {'jobs': 4, 'gpus': 1, 'queue': 'long', 'walltime': '12:00:00'}
    """
    options: dict[str, Any] = {}
    if workers is not None:
        options[_HOW_MANY.get(kind, "n_workers")] = workers
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"--cluster-option {word!r}: write NAME=VALUE")
        options[name] = yaml_value(value)
    return options
