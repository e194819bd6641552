"""The recipe of a trained model: from a file, or a module in memory, to what a worker can run."""

from .recipe import Model, ModelBytes, Numbers, load_model

__all__ = ["Model", "ModelBytes", "Numbers", "load_model"]
