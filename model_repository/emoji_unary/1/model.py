"""Text to emoji, one response a request; passes requests on to the model `emoji`."""

from diffusion_backend.triton import UnaryModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
