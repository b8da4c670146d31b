"""Text to emoji, streaming; the parameters are in config.pbtxt."""

from diffusion_backend.triton import StreamingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
