"""Run a network for measurements: plain kernels, sizes that it takes, one axis at a time."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .domain import CLASSES, NOISE, REAL, drawn

if TYPE_CHECKING:
    import torch

__all__ = [
    "SIZES",
    "Line",
    "Runner",
    "choose_domain",
    "exported_size",
    "in_double",
    "noise_of",
    "plain_kernels",
    "quiet",
    "start_size",
    "takes_only",
]

# A size the net takes is looked for here: multiples of all common strides, then of any, then the
# fixed sizes of common chip classifiers.
UNITS = (64, 96, 80, 112, 72, 120, 100, 108)
SIZES = (*UNITS, *(n for n in range(65, 129) if n not in UNITS),
         192, 256, 384, 512, 768, 1024, 224, 240, 299, 448, 32, 16, 8)  # fmt: skip
# With numbers other than noise, which the first sizes refuse for what they are.
_FEWER = (*UNITS[:4], 128, 256, 512, 224, 32)


_LONGEST = 400


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Use kernels in which an output touches its own inputs only: Winograd and FFT spread NaN."""
    import torch
    from torch.backends import cudnn, mkldnn, nnpack

    stack = contextlib.ExitStack()
    with quiet():
        for backend in (mkldnn, nnpack, cudnn):
            stack.enter_context(backend.flags(enabled=False))
    # The strips are thin: on several threads they take longer, on busy cores ten times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        with quiet():
            stack.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Torch warns about its own internals where backends are set and modules copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Runner:
    """The net at one precision; keeps the last refusal to explain itself."""

    net: Callable[[torch.Tensor], torch.Tensor]
    bands: int
    dtype: torch.dtype
    refusal: Exception | None = None
    channels: int = 1
    integer: bool = False
    domain: str = NOISE

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run on (band, y, x) -> (channel, y, x) in double; None where the net refuses the size."""
        import torch

        from ..wrappers import HeadError, not_scores

        try:
            # A copy, as the net may work in place and the input is used again.
            out = self.net(x[None].clone(memory_format=torch.contiguous_format))
        except HeadError:
            raise
        except Exception as error:  # nets refuse sizes with exceptions of any type
            self.refusal = error
            return None
        if getattr(out, "ndim", None) != 4:
            raise ValueError(not_scores(out))
        if out.is_complex():
            raise ValueError(
                "the model returns complex numbers, which are no scores: have it return their "
                "amplitude, or both parts as channels"
            )
        self.channels, self.integer = out.shape[1], not out.is_floating_point()
        return out[0].double() if min(out.shape[2:]) else None

    def draw(self, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
        """Random (band, y, x) of the numbers that the net takes."""
        return drawn(self.domain, (self.bands, *shape), seed, self.dtype)


@dataclass
class Line:
    """The net along one axis: tensors are (band, thin, long) whatever the axis is."""

    runner: Runner
    axis: int
    start: tuple[int, int]
    noise: float
    fixed: bool
    blind: bool = False
    swallows: bool = False

    @property
    def unit(self) -> int:
        """A size that the net takes on this axis; its multiples are tried too."""
        return self.start[self.axis]

    @property
    def tolerances(self) -> tuple[float, ...]:
        """Relative differences that count as none; parts of a net may be float32 inside."""
        import torch

        return (1e-9, 1e-4) if self.runner.dtype == torch.float64 else (1e-4,)

    def draw(self, length: int, seed: int = 0) -> torch.Tensor:
        """Random input of this length."""
        return self.runner.draw((self.start[1 - self.axis], length), seed)

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        """Output for an input; None where the net refuses its size."""
        out = self.runner(x if self.axis else x.transpose(1, 2))
        return out if out is None or self.axis else out.transpose(1, 2)

    def must(self, x: torch.Tensor) -> torch.Tensor:
        """Output for an input of a size that the net took before."""
        out = self.run(x)
        if out is None:
            raise ValueError(f"the net took {x.shape[2]} px once, then refused them") from (
                self.runner.refusal)  # fmt: skip
        return out

    def out_size(self, length: int) -> int | None:
        """Length of the output for an input of this length; None where the net refuses it."""
        out = self.run(self.draw(length))
        return None if out is None else out.shape[2]


def exported_size(net: object) -> tuple[int, int] | None:
    """Return the static (y, x) of a torch.export module, None where they are dynamic."""
    from torch import fx

    if not isinstance(net, fx.GraphModule):
        return None
    shapes = [node.meta["val"].shape for node in net.graph.nodes
              if node.op == "placeholder" and hasattr(node.meta.get("val"), "shape")]  # fmt: skip
    if len(shapes) != 1 or len(shapes[0]) != 4:
        return None
    y, x = shapes[0][2:]
    return (y, x) if type(y) is int and type(x) is int else None


def start_size(runner: Runner, size: tuple[int, int] | None = None) -> tuple[int, int]:
    """Find the first (y, x) the net takes, and a domain where it does not take noise.

    A size that is given is tried alone, and returned even if the net refuses it.
    """
    first: Exception | None = None
    for runner.domain in (*REAL, *CLASSES):
        for shape in [size] if size else _shapes(runner.domain):
            if runner(runner.draw(shape)) is not None:
                return shape
            first = first or runner.refusal
    runner.domain = NOISE
    if size:
        return size
    raise ValueError(
        f"the net refused {_in_words(runner.bands)} of every size tried, 8 to {max(SIZES)} px, on "
        f"device cpu, of noise and of whole numbers; the first time with: {_short(first)}. If it "
        "takes one size only, say so with load_model(..., tile=(y, x))"
    ) from first


def _short(error: Exception | None) -> str:
    """The error less the tensors that TorchScript prints in it."""
    text = repr(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _shapes(domain: str) -> Iterator[tuple[int, int]]:
    """Yield the (y, x) to try."""
    yield from ((n, n) for n in (SIZES if domain == NOISE else _FEWER))
    if domain == NOISE:
        yield from itertools.permutations(UNITS, 2)


def choose_domain(runner: Runner, start: tuple[int, int]) -> str:
    """Choose the numbers that show most of a net; return in words why none shows anything."""
    taken = runner.domain
    for domains in (REAL, CLASSES):
        best = 0.0
        for runner.domain in domains:
            share = _shown(runner, start)
            if share > best:
                best, taken = share, runner.domain
            if best == 1:
                break
        if best:
            break
    # What always gives the same has no seams, however far it looks.
    seen = bool(best) or _is_constant(runner, start)
    runner.domain = taken
    if seen:
        return ""
    return (
        "what it looks at does not show: its output is not finite for noise, fractions, large and "
        "whole numbers, or always the same for some; pass halo= if you know how far it looks"
    )


def _is_constant(runner: Runner, shape: tuple[int, int]) -> bool:
    """Whether a net gives one finite result, whatever it is given."""
    results = []
    for runner.domain in REAL:
        result = runner(runner.draw(shape))
        if result is None or not result.isfinite().all():
            return False
        results.append(result)
    return all(result.equal(results[0]) for result in results)


def _shown(runner: Runner, shape: tuple[int, int]) -> float:
    """Share of the output that is finite; 0 where that, or no number, depends on the input."""
    one, other = runner(runner.draw(shape)), runner(runner.draw(shape, seed=1))
    if one is None or other is None or one.shape != other.shape:
        return 0.0
    finite = one.isfinite()
    depends = bool(((one != other) & finite).any())
    # What is finite for some numbers only, as a logarithm, hides what is felt.
    if not depends or not finite.equal(other.isfinite()):
        return 0.0
    return finite.double().mean().item()


def takes_only(runner: Runner, start: tuple[int, int]) -> bool:
    """Whether the net refuses every longer input."""
    y, x = start
    longer = ((y + more[0], x + more[1]) for more in ((y, x), (32, 32), (0, x), (y, 0), (64, 64)))
    return all(runner(runner.draw(shape)) is None for shape in longer)


def _in_words(bands: int) -> str:
    """Say what was fed to the net."""
    return f"float32 inputs with {bands} band{'s' * (bands != 1)}"


def noise_of(runner: Runner, shape: tuple[int, int]) -> float | None:
    """Return the largest difference between runs on one input; None where the net is random."""
    import torch

    x = runner.draw(shape)
    # TorchScript recompiles itself in its first calls, with other roundings.
    for _ in range(2):
        runner(x)
    first, second = runner(x), runner(x)
    if first is None or second is None:
        error = runner.refusal
        raise ValueError(f"the net refused {tuple(x.shape)}: {error!r}") from error
    difference = torch.nan_to_num(first - second).abs().max().item()
    spread = torch.nan_to_num(first).std().item()
    return None if difference > 1e-3 * spread else 4 * difference


def in_double(single: Runner, shape: tuple[int, int]) -> Runner | None:
    """Return a float64 copy of the net, None where it cannot be one."""
    import torch

    if not isinstance(single.net, torch.nn.Module):
        return None
    try:
        with quiet():
            twin = copy.deepcopy(single.net).requires_grad_(False).double()
    except Exception:  # any module that cannot be copied is probed in float32 only
        return None
    runner = Runner(twin, single.bands, torch.float64, domain=single.domain)
    x = runner.draw(shape)
    return runner if runner(x) is not None else None
