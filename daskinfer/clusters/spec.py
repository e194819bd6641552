"""A YAML file that names a cluster of any class.

::

    cluster: dask_kubernetes.operator:KubeCluster   # or a kind of daskinfer.cluster, or an address
    arguments:                                      # what the class takes
      name: maps
      image: registry.example.org/daskinfer:1
    scale: 8                                        # or {jobs: 8}: arguments of its scale()
    adapt: {minimum: 2, maximum: 8}                 # instead of scale: of its adapt()
    submit: {walltime: "24:00:00"}                  # of the job that `daskinfer submit` makes

The file names code of installed packages that is imported and called: read none that you would not
run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from distributed import LocalCluster

from .slurm import import_cluster, jobqueue_options
from .workers import WorkerSettings

__all__ = ["ClusterSpec", "read_spec", "started", "yaml_value"]

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class ClusterSpec:
    """What a file says of a cluster.

    Attributes
    ----------
    cluster : str
        ``"module:Class"``, a kind of `daskinfer.cluster`, or an address.
    arguments : mapping
        Of the class or kind.
    scale : int, mapping or None
        Workers, or arguments of the cluster's ``scale``.
    adapt : mapping or None
        Arguments of its ``adapt``.
    submit : mapping
        Of the job that `daskinfer.submit` makes.
    """

    cluster: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    scale: int | Mapping[str, Any] | None = None
    adapt: Mapping[str, Any] | None = None
    submit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.cluster, str):
            raise ValueError(f"cluster must be a word, got {self.cluster!r}")
        if self.cluster.lower().endswith((".yaml", ".yml")):
            raise ValueError(f"a file names a cluster, not another file ({self.cluster!r})")
        for name in ("arguments", "adapt", "submit"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) and not (name == "adapt" and value is None):
                raise ValueError(f"{name} must be names and values, got {value!r}")
        if self.scale is not None and self.adapt is not None:
            raise ValueError("pass scale (so many workers) or adapt (as many as needed), not both")
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, Mapping, type(None))):
            raise ValueError(f"scale must be a number of workers, or names, got {self.scale!r}")
        if not self.names_class and (self.scale is not None or self.adapt is not None):
            raise ValueError(
                f"cluster {self.cluster!r} has no scale or adapt: say how many in arguments, as "
                "n_workers for 'processes' or jobs for 'slurm'"
            )

    @property
    def names_class(self) -> bool:
        """Whether it names a class, not a kind."""
        return _CLASS.fullmatch(self.cluster) is not None


def read_spec(path: str | Path) -> ClusterSpec:
    """Read the file.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is not YAML, or holds a key that is not known.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"cluster {str(path)!r}: no such file") from error
    try:
        told = yaml_value(text)
    except yaml.YAMLError as error:
        raise ValueError(f"cluster {str(path)!r} is not YAML: {error}") from error
    known = [f.name for f in fields(ClusterSpec)]
    unknown = sorted(set(told) - set(known), key=str) if isinstance(told, dict) else []
    if unknown or not isinstance(told, dict) or "cluster" not in told:
        wrong = f"unknown key {unknown[0]!r}" if unknown else "no key 'cluster'"
        raise ValueError(f"cluster {str(path)!r}: {wrong}; known: {', '.join(known)}")
    given = {name: value for name, value in told.items() if value is not None}
    try:
        return ClusterSpec(**given)
    except ValueError as error:
        raise ValueError(f"cluster {str(path)!r}: {error}") from error


def started(spec: ClusterSpec, options: Mapping[str, Any] | None = None) -> Any:
    """Start the cluster of a class that a file names.

    Parameters
    ----------
    spec : ClusterSpec
    options : mapping, optional
        Replace its arguments.

    Raises
    ------
    ValueError
        If there is no such class.
    TypeError
        If it is not one of clusters, or does not take these arguments.
    """
    kind = _named(spec.cluster)
    arguments = _suited(kind, dict(spec.arguments) | dict(options or {}))
    made = kind(**arguments)
    if not hasattr(made, "scheduler_address"):
        raise TypeError(f"cluster {spec.cluster!r} made {type(made).__name__}, no Dask cluster")
    if isinstance(spec.scale, int):
        made.scale(spec.scale)
    elif spec.scale is not None:
        made.scale(**spec.scale)
    if spec.adapt is not None:
        made.adapt(**spec.adapt)
    return made


def _suited(kind: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the settings of workers added, for classes of which we know how."""
    if not isinstance(kind, type):
        return arguments
    if issubclass(kind, LocalCluster) and arguments.get("processes", True):
        settings = WorkerSettings()
        return {"threads_per_worker": settings.threads, **settings.of_nanny()} | arguments
    if any(base.__name__ == "JobQueueCluster" for base in kind.__mro__):
        return jobqueue_options(arguments, walltime=arguments.get("walltime"))
    return arguments


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_cluster(module), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"cluster {name!r}: no module named {error.name!r}: install the package that has it"
        ) from error
    except AttributeError as error:
        raise ValueError(f"cluster {name!r}: {module} has no {attribute!r}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without times that are numbers: ``12:00:00`` is 43 200 in YAML 1.1."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?\d+$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)


def yaml_value(text: str) -> Any:
    """Value of a text in YAML; times stay text.

    Examples
    --------
    >>> yaml_value("12:00:00"), yaml_value("3"), yaml_value("[a, 1e-3]")
    ('12:00:00', 3, ['a', 0.001])
    """
    return yaml.load(text, Loader=_Loader)
