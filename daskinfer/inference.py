"""`Inference`: what to run on every chunk, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .device import DeviceChoice
from .forward import OutputFormat
from .inputs.aoi import AreaOfInterest
from .model import Model
from .pixels import Mask, without_reach
from .receptive.domain import NOISE
from .tiling import Tiling, Window

__all__ = ["Inference"]


@dataclass(frozen=True)
class Inference:
    """What to run, chunk by chunk.

    Attributes
    ----------
    model : Model
    tiling : Tiling
        Chunks and tiles of the raster.
    form : OutputFormat
        Bands, dtype and nodata of the result.
    in_bands : int
        Bands of every tile.
    dtype : str
        Of the raw numbers.
    raster_scale, raster_offset : tuple of float
        The raster's own scale and offset, per band.
    batch_size : int
        Tiles in one forward pass.
    channels : int
        Scores of the model per output pixel.
    scale : Fraction
        Output pixels per input pixel.
    margin : tuple of int
        Input pixels ``(y, x)`` at the top and left that an unpadded model gives no output for.
    domain : str
        Numbers that a model can be tried on, of `daskinfer.receptive.domain`.
    device : str or callable
        What runs the model; see `daskinfer.device.DeviceChoice`.
    tuned : bool
        Whether the worker may find a batch size of its own, up to `batch_size`.
    fixed : bool
        Whether every batch is run in full size.
    area : AreaOfInterest or None
        Beyond it the output is nodata; None for all of the raster.
    mask_halo : tuple of int or None
        Input pixels ``(y, x)`` around nodata, on the stride lattice, within which the output is
        nodata too; None where only nodata itself is.
    """

    model: Model
    tiling: Tiling
    form: OutputFormat
    in_bands: int
    dtype: str
    raster_scale: tuple[float, ...] = (1.0,)
    raster_offset: tuple[float, ...] = (0.0,)
    batch_size: int = 1
    channels: int = 1
    scale: Fraction = Fraction(1)
    margin: tuple[int, int] = (0, 0)
    domain: str = NOISE
    device: DeviceChoice = "auto"
    tuned: bool = False
    fixed: bool = False
    area: AreaOfInterest | None = None
    mask_halo: tuple[int, int] | None = None

    @property
    def blended(self) -> bool:
        """Whether overlapping tiles are averaged."""
        return bool(self.tiling.y.overlap or self.tiling.x.overlap)

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """``(band, y, x)`` of every tile."""
        y, x = self.tiling.tile
        return self.in_bands, y, x

    @property
    def chunk(self) -> tuple[int, int]:
        """``(height, width)`` of a chunk in output pixels."""
        y, x = (int(side * self.scale) for side in self.tiling.chunk)
        return y, x

    def window(self, index: tuple[int, int]) -> Window:
        """Output pixels of a chunk."""
        return self.tiling.chunk_at(index).window.scaled(self.scale)

    def trusted(self, valid: Mask, origin: tuple[int, int]) -> Mask:
        """Pixels of a mask whose output is to be kept, where it begins at this pixel."""
        if self.mask_halo is None:
            return valid
        stride = self.tiling.y.stride, self.tiling.x.stride
        return without_reach(valid, origin, self.mask_halo, stride)

    def inside(self, index: tuple[int, int]) -> Mask | None:
        """Output pixels of a chunk that lie in the area, bool ``(y, x)``; None where all count."""
        return None if self.area is None else self.area.inside(self.window(index), self.scale)
