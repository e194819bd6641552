"""Several files, or other things than files, as one source of windows."""
