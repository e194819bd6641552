"""One tile through a freshly loaded model, before any work depends on it.

The client has measured the network on its own CPU.  A worker's device is another matter: constants
that were traced for another one, kernels that it lacks, half precision that overflows, a library of
another version.  Such a model fails here, once, in words, and not in every chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .receptive.domain import drawn
from .receptive.measured import is_remembered

if TYPE_CHECKING:
    import torch

    from .forward import Forward
    from .inference import Inference

__all__ = ["check_device_runs"]

# Of the scores' spread.  Sums differ with the order of adding, more so in half precision.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}
_MOST = 4


def check_device_runs(device: Forward, inference: Inference) -> None:
    """Run one tile and see that a model does on its device what it did where it was measured.

    Nothing is run where this process has measured the network on the same kind of device.

    Parameters
    ----------
    device : Forward
        With the model loaded.
    inference : Inference

    Raises
    ------
    ValueError
        If the model does not run there, gives scores of another shape, none that is finite, two
        results for one input, or another result for a tile in a batch.  Names the device.
    """
    model = inference.model
    if device.device.type == "cpu" and is_remembered("steady", model, inference.in_bands):
        return
    _Check(device, inference).run()


class _Check:
    def __init__(self, device: Forward, inference: Inference) -> None:
        self._device = device
        self._inference = inference
        # A compiled network is compiled once more for every other size of its batches.
        self._one_size = inference.fixed or inference.model.compile
        self._size = inference.batch_size if self._one_size else 1

    def run(self) -> None:
        import torch

        size = max(self._size, min(self._inference.batch_size, _MOST))
        shape = (size, *self._inference.tile_shape)
        x = drawn(self._inference.domain, shape).to(self._device.device)
        with torch.inference_mode():
            first = self._scores(x[: self._size])
            self._check_scores(first)
            if self._differ(first, self._scores(x[: self._size])):
                raise self._error(
                    "gives two results for one input: is dropout always on, or was it exported in "
                    "train mode? Export it after model.eval()"
                )
            if size > self._size and self._differ(first, self._scores(x)[: self._size]):
                raise self._error(
                    f"gives another result for a tile among {size}: is BatchNorm without running "
                    "statistics, or was it exported in train mode?"
                )

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        try:
            # Networks that work in place get a copy.
            scores = self._device.scores(x.clone())
        except Exception as error:
            # Whatever a library raises for a device that it cannot use.
            raise self._error(f"fails there: {type(error).__name__}: {error}") from error
        return scores

    def _check_scores(self, scores: torch.Tensor) -> None:
        import torch

        channels = self._inference.channels
        if scores.shape[1] != channels:
            raise self._error(f"gives {scores.shape[1]} scores per pixel, measured were {channels}")
        if not torch.isfinite(scores).any():
            hint, domain = "", self._inference.domain
            if self._inference.model.precision != "float32":
                hint = ": does it overflow? pass precision='float32' or 'bfloat16'"
            raise self._error(f"gives no finite number for a tile of {domain}{hint}")

    def _differ(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        import torch

        if one.shape != other.shape:
            return True
        spread = torch.nan_to_num(one, posinf=0, neginf=0).std().item()
        tolerance = _TOLERANCE[self._inference.model.precision] * max(spread, 1e-6)
        return not torch.allclose(one, other, rtol=1e-3, atol=tolerance, equal_nan=True)

    def _error(self, what: str) -> ValueError:
        tile: Any = "x".join(map(str, self._inference.tile_shape))
        return ValueError(
            f"model {self._inference.model.name} on device {self._device.name}, with a tile of "
            f"{tile} (band x y x x): it {what}"
        )
