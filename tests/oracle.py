"""What is right, computed the plain way: the model run once on the whole raster."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F


def whole(net, raw, *, valid=None, stride=1, least=1, scale=1.0, offset=0.0, mean=0.0, std=1.0):
    """Scores ``(channel, y, x)`` of `net` for a raster ``(band, y, x)``.

    Normalised, nodata filled with 0, padded at the bottom and right only, up to the stride and the
    smallest size that the net accepts, cropped.
    """
    shape = (-1, 1, 1)
    numbers = [np.reshape(np.float32(n), shape) for n in (scale, offset, mean, std)]
    x = ((raw.astype(np.float32) * numbers[0] + numbers[1]) - numbers[2]) / numbers[3]
    if valid is not None:
        x = np.where(valid, x, np.float32(0))
    height, width = x.shape[1:]
    right, bottom = (max(least, -(-size // stride) * stride) - size for size in (width, height))
    pad = (0, right, 0, bottom)
    with torch.inference_mode():
        batch = F.pad(torch.from_numpy(np.ascontiguousarray(x))[None], pad, mode="replicate")
        return net(batch)[0, :, :height, :width].numpy()


def assert_classes(actual, scores, *, margin=1e-5):
    """Classes ``(y, x)`` equal the whole image's wherever its top two scores differ by more."""
    top = np.sort(scores, axis=0)
    certain = top[-1] - top[-2] > margin
    expected = scores.argmax(axis=0)
    wrong = certain & (actual != expected)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} pixels differ"
