"""Detectors that make no mistakes, and rasters on which it is known what there is to find."""

from __future__ import annotations

import numpy as np
import torch
from rasterio.features import shapes


class Patches(torch.nn.Module):
    """Finds every patch of one number that is not 0: its bounds in the image, and its pixels.

    What goes on beyond the image it cannot see, as any detector.
    """

    def __init__(self, masks=False):
        super().__init__()
        self.masks = masks

    def forward(self, images):
        return [self.found(image[0].numpy().astype(np.int32)) for image in images]

    def found(self, numbers):
        boxes, labels, masks = [], [], []
        for outline, number in shapes(numbers, numbers > 0):
            x, y = np.array(outline["coordinates"][0]).T
            boxes.append([x.min(), y.min(), x.max(), y.max()])
            labels.append(int(number) % 3)
            masks.append(numbers == number)
        result = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "scores": torch.full((len(boxes),), 0.75),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }
        if self.masks:
            stack = np.stack(masks)[:, None] if masks else np.empty((0, 1, *numbers.shape))
            result["masks"] = torch.from_numpy(stack.astype(np.float32))
        return result


def planted(height, width, boxes):
    """A raster of 0 with solid boxes ``(x1, y1, x2, y2)``, numbered from 1."""
    data = np.zeros((1, height, width), np.uint16)
    for number, (x1, y1, x2, y2) in enumerate(boxes, 1):
        assert not data[0, y1:y2, x1:x2].any(), "boxes overlap"
        data[0, y1:y2, x1:x2] = number
    return data


def scattered(height, width, count, largest, seed=0):
    """Boxes at random that do not overlap; many touch."""
    rng = np.random.default_rng(seed)
    taken = np.zeros((height, width), bool)
    boxes = []
    while len(boxes) < count:
        w, h = (int(n) for n in rng.integers(1, largest + 1, 2))
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        if not taken[y : y + h, x : x + w].any():
            taken[y : y + h, x : x + w] = True
            boxes.append((x, y, x + w, y + h))
    return boxes
