"""An output in several files: a grid of COGs, and a VRT that shows them as one raster."""
