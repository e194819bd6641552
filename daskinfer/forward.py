"""One forward pass: raw pixels in, output pixels out, everything between on the device.

The raw numbers are shipped to the device as they are stored (uint16 is half the bytes of float32)
and cast and normalised there; class indices are taken there too, so that one byte per pixel comes
back instead of one float per class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from .model import Model, Numbers

__all__ = ["BatchFunction", "Forward", "OutputFormat", "native", "to_classes", "to_values"]

Array = npt.NDArray[Any]

# Rasters hold dtypes that torch lacks or takes in one byte order only.
_TORCH_SAFE = {"bool", "uint8", "int8", "int16", "uint16", "int32", "int64"}
_TORCH_SAFE |= {"float16", "float32", "float64"}


class BatchFunction(Protocol):
    """What an actor runs: one batch of raw tiles to one batch of output tiles."""

    def __call__(self, batch: Array, valid: npt.NDArray[np.bool_] | None) -> Array:
        """Map ``(n, band, y, x)`` raw and ``(n, y, x)`` valid to ``(n, band, y, x)`` output."""
        ...


@dataclass(frozen=True)
class OutputFormat:
    """Bands, dtype and nodata of the raster that a model makes.

    Examples
    --------
    >>> OutputFormat.of("classes", channels=3)
    OutputFormat(bands=1, dtype='uint8', nodata=255)
    >>> OutputFormat.of("classes", channels=300)
    OutputFormat(bands=1, dtype='uint16', nodata=65535)
    """

    bands: int
    dtype: str
    # Not compared: NaN is not equal to itself, and bands and dtype decide on it.
    nodata: float = field(compare=False)

    @classmethod
    def of(cls, output: str, channels: int) -> OutputFormat:
        """Format for scores of this many channels.

        Classes use the narrowest unsigned integer whose largest value is no class, since that one
        is nodata: uint8 up to 255 classes, uint16 above.
        """
        if output != "classes":
            return cls(channels, "float32", float("nan"))
        classes = max(channels, 2)
        if classes > 65535:
            raise ValueError(f"{classes} classes do not fit uint16; at most 65535 do")
        return cls(1, "uint8", 255) if classes <= 255 else cls(1, "uint16", 65535)


def native(array: Array) -> Array:
    """The array in a dtype and memory layout that torch takes without loss where there is one.

    >>> native(np.array([1, 2], ">f4")).dtype, native(np.array([7], "uint32")).dtype
    (dtype('float32'), dtype('float64'))
    """
    # Writeable, or torch warns of every array that came from another process.
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    return array if array.dtype.name in _TORCH_SAFE else array.astype(np.float64)


class Forward:
    """The model on one device, as a function of batches.

    Parameters
    ----------
    model : Model
        What to build; its `scale` and `offset` take the place of the raster's where given.
    raster_scale, raster_offset : tuple of float
        The raster's own scale and offset, per band or one for all.
    device : str, default "cpu"
        A torch device.
    blended : bool, default False
        Return float32 values per channel, to be averaged over overlapping tiles, even for classes.
    """

    def __init__(
        self,
        model: Model,
        *,
        raster_scale: Numbers = (1.0,),
        raster_offset: Numbers = (0.0,),
        device: str = "cpu",
        blended: bool = False,
    ) -> None:
        import torch

        self.model = model
        self._blended = blended
        self.device = torch.device(device)
        self._network = model.network(device)
        scale, offset = model.scaling(raster_scale, raster_offset)
        self._scale = self._per_band(scale, 1.0)
        self._offset = self._per_band(offset, 0.0)
        self._mean = self._per_band(model.mean or (0.0,), 0.0)
        self._std = self._per_band(model.std or (1.0,), 1.0)
        self._fill = self._fill_value()

    def __call__(self, batch: Array, valid: npt.NDArray[np.bool_] | None) -> Array:
        """Run one batch.

        Parameters
        ----------
        batch : ndarray, shape (n, band, y, x)
            Raw numbers as the raster stores them.
        valid : ndarray of bool, shape (n, y, x), or None
            False where a pixel is nodata; None where all are valid.

        Returns
        -------
        ndarray, shape (n, band, y, x)
            In the dtype of `OutputFormat`; nodata where a score is not finite.
        """
        import torch

        with torch.inference_mode():
            x = self.normalise(torch.from_numpy(native(batch)).to(self.device))
            if valid is not None:
                mask = torch.from_numpy(np.require(valid, bool, ["C", "W"])).to(self.device)
                x = torch.where(mask[:, None], x, self._fill)
            result: Array = self.postprocess(self.scores(x)).cpu().numpy()
        return result

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the network, float32 ``(n, channel, y, x)``, for normalised input."""
        import torch

        precision = self.model.precision
        with torch.autocast(
            self.device.type, getattr(torch, precision), enabled=precision != "float32"
        ):
            scores = self._network(x)
        if not isinstance(scores, torch.Tensor) or scores.ndim != 4:
            shape = (
                tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            )
            raise ValueError(f"the model must return scores (n, channel, y, x), got {shape}")
        return scores.float()

    def normalise(self, raw: torch.Tensor) -> torch.Tensor:
        """``((raw * scale + offset) - mean) / std`` in float32, in this order.

        Folding the four numbers into two would lose digits where the mean is large against the
        spread (heights, for one).
        """
        import torch

        # A copy even where the dtype is float32 already: models that work in place get their own.
        x = raw.to(torch.float32, copy=True)
        for operation, value in (
            (x.mul_, self._scale),
            (x.add_, self._offset),
            (x.sub_, self._mean),
            (x.div_, self._std),
        ):
            if value is not None:
                operation(value)
        return x

    def postprocess(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores to the output raster's bands, or to values that can be blended."""
        if self._blended or self.model.output != "classes":
            return to_values(scores, self.model)
        if scores.shape[1] == 1:
            return to_classes(to_values(scores, self.model), self.model)
        # The largest score has the largest probability.
        return to_classes(scores, self.model)

    def _per_band(self, values: Numbers, neutral: float) -> torch.Tensor | None:
        """Values shaped ``(band, 1, 1)`` on the device; None where they would change nothing."""
        import torch

        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None, None]

    def _fill_value(self) -> torch.Tensor:
        """What nodata pixels hold after normalisation: 0, or the normalised `fill`."""
        import torch

        if self.model.fill is None:
            return torch.zeros((1, 1, 1), device=self.device)
        numbers = (self._scale, self._offset, self._mean, self._std)
        bands = max(1 if value is None else len(value) for value in numbers)
        return self.normalise(torch.full((bands, 1, 1), float(self.model.fill), device=self.device))


def to_values(scores: torch.Tensor, model: Model) -> torch.Tensor:
    """Scores ``(n, channel, y, x)`` after the activation, NaN where they are not finite.

    Classes of several channels without an activation of their own get the one by which scores of
    neighbouring tiles can be averaged, softmax.
    """
    import torch

    activation = model.activation
    if model.output == "classes" and activation is None and scores.shape[1] > 1:
        activation = "softmax"
    # Before the activation, which makes probabilities of infinite scores.
    finite = torch.isfinite(scores)
    if activation == "softmax":
        finite = finite.all(dim=1, keepdim=True)
        scores = scores.softmax(dim=1)
    elif activation == "sigmoid":
        scores = scores.sigmoid()
    return torch.where(finite, scores, torch.nan)


def to_classes(values: torch.Tensor, model: Model) -> torch.Tensor:
    """Classes ``(n, 1, y, x)`` from scores or probabilities, nodata where any is not finite."""
    import torch

    channels = values.shape[1]
    form = OutputFormat.of("classes", channels)
    finite = torch.isfinite(values).all(dim=1, keepdim=True)
    if channels == 1:
        classes = values >= (0.5 if model.threshold is None else model.threshold)
    else:
        classes = values.argmax(dim=1, keepdim=True)
    # torch has no uint16 arithmetic to speak of: select in int32, narrow last.
    marked = torch.where(finite, classes.to(torch.int32), int(form.nodata))
    return marked.to(getattr(torch, form.dtype))
