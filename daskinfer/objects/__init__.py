"""Objects instead of pixels: detections over large rasters, and class maps as polygons."""
