"""Make docs/seams.png: the demo scene, its class map without a halo, and with the measured one.

    python scripts/make_readme_picture.py

Both maps come from the same model and from tiles that deliver the same 128 x 128 px; the one
without a halo reads no more than that, the other reads the measured context around it.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
import rasterio
import torch

import daskinfer as di
from daskinfer.demo import demo_path
from daskinfer.quicklook import class_picture, true_color

mpl.use("agg")
import matplotlib.pyplot as plt

CORE = 128
# Rows and columns shown enlarged: clouds and shadows across tile lines.
ZOOM = (0, 192, 312, 696)
INK, LINE = "#222222", "#d1495b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent.parent / "docs" / "seams.png"
    parser.add_argument("output", nargs="?", type=Path, default=default)
    arguments = parser.parse_args()
    model = di.demo_model()
    halo = di.receptive_field(model).halo[0]
    whole = whole_image(model)
    bare, wrong = class_map(model, 0, whole)
    exact, left = class_map(model, halo, whole)
    rest = f"{left:.1%}" if left else "none"
    scene = np.moveaxis(true_color(demo_path(), ("red", "green", "blue")), 0, -1)
    panels = [
        ("scene, true colour", scene, False),
        (f"tiles without a halo: {wrong:.1%} of the pixels wrong", bare, True),
        (f"tiles with the measured halo, {halo} px: {rest} wrong", exact, True),
    ]
    draw(panels, model, arguments.output)
    print(f"{arguments.output}, {arguments.output.stat().st_size / 1e3:.0f} kB")
    print(f"pixels off the whole image: {wrong:.3%} without a halo, {left:.3%} with {halo} px")


def class_map(model: di.Model, halo: int, whole: np.ndarray) -> tuple[np.ndarray, float]:
    """Colours ``(y, x, rgb)`` of the map made with a halo, and its share of wrong pixels."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # That seams will show is the point.
        warnings.filterwarnings("ignore", message="halo .* below the receptive-field radius")
        path = Path(folder) / "map.tif"
        di.run(demo_path(), model, path, halo=halo, tile=CORE + 2 * halo)
        with rasterio.open(path) as dataset:
            wrong = float((dataset.read(1) != whole).mean())
        return np.moveaxis(class_picture(path), 0, -1), wrong


def whole_image(model: di.Model) -> np.ndarray:
    """Classes of the demo scene with the network run once over all of it, untiled."""
    with rasterio.open(demo_path()) as dataset:
        raw = dataset.read().astype(np.float32)
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (model.mean, model.std))
    x = torch.from_numpy((raw * np.float32(model.scale[0]) - mean) / std)[None]
    with torch.inference_mode():
        return model.network()(x)[0].argmax(0).numpy()


def draw(panels: list[tuple[str, np.ndarray, bool]], model: di.Model, output: Path) -> None:
    height, width = panels[0][1].shape[:2]
    top, bottom, left, right = ZOOM
    figure, axes = plt.subplots(2, 3, figsize=(12, 4.55), dpi=100)
    figure.subplots_adjust(0.004, 0.07, 0.996, 0.945, wspace=0.02, hspace=0.05)
    for (title, picture, tiled), above, below in zip(panels, *axes, strict=True):
        above.imshow(picture, interpolation="antialiased")
        above.set_title(title, fontsize=11, color=INK)
        box = plt.Rectangle((left, top), right - left, bottom - top, fill=False, color=INK, lw=1.2)
        above.add_patch(box)
        below.imshow(picture[top:bottom, left:right], interpolation="nearest")
        if tiled:
            for at in range(CORE, width, CORE):
                above.axvline(at - 0.5, color=LINE, lw=0.5, alpha=0.8)
            for at in range(CORE, height, CORE):
                above.axhline(at - 0.5, color=LINE, lw=0.5, alpha=0.8)
            mark_lines(below)
    for axis in axes.flat:
        axis.set_axis_off()
    legend(figure, model)
    figure.savefig(output, pil_kwargs={"optimize": True})


def mark_lines(axis: plt.Axes) -> None:
    """Marks at the border where tile lines run: a line across would hide the seam on it."""
    top, bottom, left, right = ZOOM
    marks = {"ls": "none", "color": LINE, "ms": 9, "mec": "white", "mew": 0.8, "zorder": 3}
    for at in range(-left % CORE, right - left, CORE):
        axis.plot(at - 0.5, 3, marker="v", **marks)
        axis.plot(at - 0.5, bottom - top - 4, marker="^", **marks)
    for at in range(-top % CORE, bottom - top, CORE):
        if at:
            axis.plot(3, at - 0.5, marker=">", **marks)
            axis.plot(right - left - 4, at - 0.5, marker="<", **marks)


def legend(figure: plt.Figure, model: di.Model) -> None:
    pairs = zip(model.class_names, model.class_colors, strict=True)
    handles = [plt.Rectangle((0, 0), 1, 1, fc=c, ec=INK, lw=0.5, label=n) for n, c in pairs]
    mark = plt.Line2D(
        [], [], ls="none", marker="v", color=LINE, label=f"tile line, {CORE} px apart"
    )
    box = plt.Rectangle((0, 0), 1, 1, fill=False, ec=INK, lw=1.2, label="enlarged below")
    figure.legend(handles=[*handles, mark, box], loc="lower center", ncols=5, frameon=False)


if __name__ == "__main__":
    main()
