"""One forward pass of a detection model: raw tiles in, objects of each tile out.

What a detector returns has another length for every tile, so a batch comes back as an array of
Python objects, one `TileObjects` per tile; the actor carries those like any other outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from daskinfer.forward import Forward, memory_errors
from daskinfer.objects.table import Boxes
from daskinfer.pixels import Array, Mask

if TYPE_CHECKING:
    import torch

__all__ = ["ObjectForward", "TileObjects"]

# Of a mask that tells how sure the model is of each pixel, as torchvision's do.
_MASK_THRESHOLD = 0.5


@dataclass(frozen=True, eq=False)
class TileObjects:
    """What the model found in one tile.

    Attributes
    ----------
    boxes : ndarray of float64, shape (n, 4)
        ``x1, y1, x2, y2`` in pixels of the tile.
    scores : ndarray of float32, shape (n,)
    labels : ndarray of int32, shape (n,)
    masks : ndarray of bool, shape (n, y, x), or None
        Pixels of each object in the tile.
    """

    boxes: Boxes
    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]
    masks: npt.NDArray[np.bool_] | None = None


class ObjectForward(Forward):
    """A detection model on one torch device.

    The network is called as torchvision's detectors are in eval mode: with a batch of images (a
    list of them, for TorchScript), for which it returns one dict for each, with ``boxes`` ``(n,
    4)`` and, where it has them, ``scores``, ``labels`` and ``masks`` ``(n, 1, y, x)`` or ``(n, y,
    x)``.  Parameters as of `Forward`.
    """

    def forward(self, loaded: Any) -> Any:
        """What the network found, still on the device: one dict per tile."""
        import torch

        precision = self.model.precision
        with memory_errors(), torch.inference_mode():
            x = self.prepared(loaded)
            images = list(x) if isinstance(self._network, torch.jit.ScriptModule) else x
            with torch.autocast(
                self.device.type, getattr(torch, precision), enabled=precision != "float32"
            ):
                found = self._network(images)
        return _per_tile(found, len(x))

    def check(self, tile_shape: tuple[int, int, int], dtype: str) -> None:
        """Run one empty tile, before any chunk depends on it.

        Raises
        ------
        ValueError
            If the model fails, or what it returns are no objects; names it and the device.
        """
        try:
            self.copy_out(self.forward(self.copy_in(np.zeros((1, *tile_shape), dtype), None)))
        except MemoryError:
            raise
        except Exception as error:
            # Whatever a network raises for what it cannot take.
            raise ValueError(
                f"model {self.model.name} on device {self.name} finds no objects in an empty tile "
                f"of {'x'.join(map(str, tile_shape))} (band x y x x): {error}"
            ) from error

    def copy_out(self, result: Any) -> Array:
        """Array of `TileObjects`, one per tile."""
        tiles = np.empty(len(result), object)
        for i, found in enumerate(result):
            tiles[i] = _tile_objects(found)
        return tiles


def _per_tile(found: Any, tiles: int) -> Sequence[Mapping[str, torch.Tensor]]:
    """One dict per tile, or an error that says what came instead."""
    # Scripted torchvision models return their losses too.
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], (list, tuple)):
        found = found[1]
    fits = isinstance(found, (list, tuple)) and all(
        isinstance(one, Mapping) and "boxes" in one for one in found
    )
    if not fits:
        raise ValueError(
            "a detection model must return a list of dicts with 'boxes' (n, 4), 'scores' and "
            f"'labels', one for each image, got {_kind(found)}: models of pixels go to run()"
        )
    if len(found) != tiles:
        raise ValueError(f"the model returned {len(found)} results for {tiles} tiles")
    return found  # type: ignore[no-any-return]


def _kind(found: Any) -> str:
    if isinstance(found, (list, tuple)) and found:
        inner = found[0]
        keys = f" with {sorted(map(str, inner))}" if isinstance(inner, Mapping) else ""
        return f"{type(found).__name__} of {type(inner).__name__}{keys}"
    return type(found).__name__


def _tile_objects(found: Mapping[str, torch.Tensor]) -> TileObjects:
    boxes = found["boxes"].detach().double().cpu().numpy()
    count = len(boxes)
    if boxes.shape != (count, 4):
        raise ValueError(f"boxes of a tile must be (n, 4), x1 y1 x2 y2, got {boxes.shape}")
    scores = _column(found, "scores", count, np.float32)
    labels = _column(found, "labels", count, np.int32)
    return TileObjects(boxes, scores, labels, _masks(found.get("masks"), count))


def _column(found: Mapping[str, torch.Tensor], name: str, count: int, dtype: Any) -> Any:
    import torch

    if found.get(name) is None:
        return np.ones(count, dtype)
    # Numpy knows no bfloat16, which detectors in that precision give.
    exact = torch.float32 if found[name].is_floating_point() else torch.int64
    values = found[name].detach().to(exact).cpu().numpy().astype(dtype)
    if values.shape != (count,):
        raise ValueError(f"{count} boxes in a tile, but {name} of shape {values.shape}")
    return values


def _masks(masks: torch.Tensor | None, count: int) -> Mask | None:
    if masks is None:
        return None
    if masks.ndim == 4 and masks.shape[1] == 1:
        masks = masks[:, 0]
    if masks.ndim != 3 or len(masks) != count:
        raise ValueError(f"{count} boxes in a tile, but masks of shape {tuple(masks.shape)}")
    sure = masks > _MASK_THRESHOLD if masks.is_floating_point() else masks > 0
    pixels: Mask = sure.cpu().numpy()
    return pixels
