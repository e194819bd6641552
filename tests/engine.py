"""Inference over a source in the calling thread, without a cluster and without a file."""

from __future__ import annotations

import numpy as np

from daskinfer.infer import infer_chunk, release_actor, using_actor
from daskinfer.settle import Choice, masking_halo, pick_bands, settle
from daskinfer.source import source_of


def inferred(source, model, *, mask_halo=False, **choice):
    """Output ``(band, y, x)`` of a source, chunk by chunk, and the number of tiles that ran."""
    source = pick_bands(source_of(source), model)
    inference, field = settle(source, model, Choice(**choice))
    inference = masking_halo(inference, field, mask_halo)
    form, tiles = inference.form, 0
    result = np.empty((form.bands, *source.grid.scaled(inference.scale).shape), form.dtype)
    with using_actor(inference) as actor:
        for number in range(inference.tiling.chunks):
            index = inference.tiling.index_of(number)
            rows, cols = inference.window(index).slices()
            done = infer_chunk(inference, index, source.read, actor)
            result[:, rows, cols] = done.data
            tiles += done.tiles
    release_actor(inference)
    return result, tiles
