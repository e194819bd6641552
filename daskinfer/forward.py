"""One forward pass: raw pixels in, output pixels out, everything between on the device.

The raw numbers are shipped to the device as they are stored (uint16 is half the bytes of float32)
and cast and normalised there; class indices are taken there too, so that one byte per pixel comes
back instead of one float per class.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .device import Device
from .pixels import Array, Mask

if TYPE_CHECKING:
    import torch

    from .model import Model
    from .model.recipe import Numbers

__all__ = [
    "PROBABILITY_SCALE",
    "Forward",
    "OutputFormat",
    "memory_errors",
    "native",
    "to_classes",
    "to_pixels",
    "to_values",
]

PROBABILITY_SCALE = 0.004
"""Of probabilities kept as integers: 250 is 1, and 0.5 is 125, exactly."""

# How far a probability may be off by rounding.
_SLACK = 1e-3
# Rasters hold dtypes that torch lacks or takes in one byte order only.
_TORCH_SAFE = {"bool", "uint8", "int8", "int16", "uint16", "int32", "int64"}
_TORCH_SAFE |= {"float16", "float32", "float64"}


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
    # What a band's numbers are multiplied by; empty where they mean themselves.
    scales: tuple[float, ...] = field(default=(), repr=False)

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

    @classmethod
    def for_model(cls, model: Model, channels: int) -> OutputFormat:
        """Format for what a model makes of scores of this many channels.

        Raises
        ------
        ValueError
            If it has no numbers of that kind.
        """
        if model.dtype != "float32" and model.output != "probabilities":
            raise ValueError(
                f"dtype={model.dtype!r} is for output='probabilities', not {model.output!r}"
            )
        if not model.confidence:
            form = cls.of(model.output, channels)
            if model.dtype == "float32":
                return form
            return cls(channels, model.dtype, 255, (PROBABILITY_SCALE,) * channels)
        if model.output != "classes":
            raise ValueError(f"confidence is told beside classes, not {model.output!r}")
        if channels == 1 and model.activation is None:
            raise ValueError(
                "confidence of a single score needs a probability: pass activation='sigmoid', or "
                "'identity' if the score is one"
            )
        form = cls.of("classes", channels)
        return cls(2, form.dtype, form.nodata, (1.0, PROBABILITY_SCALE))


def native(array: Array) -> Array:
    """The array in a dtype and memory layout that torch takes without loss where there is one.

    >>> native(np.array([1, 2], ">f4")).dtype, native(np.array([7], "uint32")).dtype
    (dtype('float32'), dtype('float64'))
    """
    # Writeable, or torch warns of every array that came from another process.
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    return array if array.dtype.name in _TORCH_SAFE else array.astype(np.float64)


class Forward(Device):
    """The model on one torch device, as an actor runs it.

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
        self.name = device
        self._network = _built(model, device)
        # Convolutions run up to twice as fast on it, on CPUs and on tensor cores.
        self._layout: Any = torch.channels_last
        scale, offset = model.scaling(raster_scale, raster_offset)
        self._scale = self._per_band(scale, 1.0)
        self._offset = self._per_band(offset, 0.0)
        self._low = self._per_band(model.clip_min or (-math.inf,), -math.inf)
        self._high = self._per_band(model.clip_max or (math.inf,), math.inf)
        self._mean = self._per_band(model.mean or (0.0,), 0.0)
        self._std = self._per_band(model.std or (1.0,), 1.0)
        self._fill = self._fill_value()

    def copy_in(self, batch: Array, valid: Mask | None) -> Any:
        """Batch and mask as tensors on the device."""
        import torch

        mask = None if valid is None else torch.from_numpy(np.require(valid, bool, ["C", "W"]))
        raw = torch.from_numpy(native(batch)).to(self.device)
        return raw, None if mask is None else mask.to(self.device)

    def forward(self, loaded: Any) -> Any:
        """Output tensor ``(n, band, y, x)`` of a batch.

        In the dtype of `OutputFormat`; nodata where a score is not finite.
        """
        import torch

        with memory_errors(), torch.inference_mode():
            return self.postprocess(self.scores(self.prepared(loaded)))

    def prepared(self, loaded: Any) -> torch.Tensor:
        """What the network sees: normalised, nodata filled."""
        import torch

        raw, mask = loaded
        x = self.normalise(raw)
        if mask is not None:
            x = torch.where(mask[:, None], x, self._fill)
        if raw.is_floating_point():
            # What one date of several lacks, where others have the pixel.
            x = torch.where(torch.isnan(raw), self._fill, x)
        return x

    def copy_out(self, result: Any) -> Array:
        """The output as an array of its own."""
        output: Array = result.cpu().numpy()
        return output

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the network, float32 ``(n, channel, y, x)``, for normalised input."""
        import torch

        precision = self.model.precision
        with torch.autocast(
            self.device.type, getattr(torch, precision), enabled=precision != "float32"
        ):
            scores = self._called(x)
        if not isinstance(scores, torch.Tensor) or scores.ndim != 4:
            from .wrappers import not_scores

            raise ValueError(not_scores(scores))
        return scores.float()

    def _called(self, x: torch.Tensor) -> Any:
        import torch

        try:
            return self._network(x.contiguous(memory_format=self._layout))
        except RuntimeError as error:
            # Networks that flatten with `view` need the plain layout.
            if self._layout is torch.contiguous_format or "view size" not in str(error):
                raise
        self._layout = torch.contiguous_format
        return self._network(x.contiguous())

    def normalise(self, raw: torch.Tensor) -> torch.Tensor:
        """``(clip(raw * scale + offset) - mean) / std`` in float32, in this order.

        Folding the four numbers into two would lose digits where the mean is large against the
        spread (heights, for one).
        """
        import torch

        # A copy even where the dtype is float32 already: models that work in place get their own.
        x = raw.to(torch.float32, copy=True)
        for operation, value in (
            (x.mul_, self._scale),
            (x.add_, self._offset),
            (x.clamp_min_, self._low),
            (x.clamp_max_, self._high),
            (x.sub_, self._mean),
            (x.div_, self._std),
        ):
            if value is not None:
                operation(value)
        return x

    def postprocess(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores to the output raster's bands, or to values that can be blended."""
        if self._blended:
            return to_values(scores, self.model)
        if self.model.output == "classes" and scores.shape[1] > 1 and not self.model.confidence:
            # The largest score has the largest probability.
            return to_classes(scores, self.model)
        return to_pixels(to_values(scores, self.model), self.model)

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
        numbers = (self._scale, self._offset, self._low, self._high, self._mean, self._std)
        bands = max(1 if value is None else len(value) for value in numbers)
        return self.normalise(torch.full((bands, 1, 1), float(self.model.fill), device=self.device))


def _built(model: Model, device: str) -> Any:
    """The network, compiled if the recipe says so."""
    import torch

    network = model.network(device)
    # One batch shape per run: a graph for any shape would be slower.
    return torch.compile(network, dynamic=False) if model.compile else network


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn torch's ways to say that memory is short into `MemoryError`."""
    import torch

    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in text:
            raise
        # Its frames hold the tensors that take the memory.
        error.with_traceback(None)
        raise MemoryError(text) from None


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


def to_pixels(values: torch.Tensor, model: Model) -> torch.Tensor:
    """What `to_values` made, as the output's bands ``(n, band, y, x)``."""
    import torch

    if model.output == "probabilities" and model.dtype != "float32":
        return _scaled(values, 255).to(getattr(torch, model.dtype))
    if model.output != "classes":
        return values
    classes = to_classes(values, model)
    if not model.confidence:
        return classes
    # torch cannot put uint16 together.
    wide, nodata = classes.to(torch.int32), 255 if classes.dtype == torch.uint8 else 65535
    if values.shape[1] == 1:
        sure = torch.where(wide == 1, values, 1 - values)
    else:
        sure = values.amax(dim=1, keepdim=True)
    sure = torch.where(wide == nodata, torch.nan, sure)
    return torch.cat([wide, _scaled(sure, nodata)], dim=1).to(classes.dtype)


def _scaled(values: torch.Tensor, nodata: int) -> torch.Tensor:
    """Probabilities as int32 in steps of `PROBABILITY_SCALE`; nodata where they are none."""
    import torch

    real = (values >= -_SLACK) & (values <= 1 + _SLACK)
    steps = torch.round(torch.where(real, values.clamp(0, 1), 0.0) / PROBABILITY_SCALE)
    return torch.where(real, steps.to(torch.int32), nodata)


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
