"""A Triton Inference Server backend for Hugging Face ``diffusers`` pipelines."""

__version__ = "0.1.0"
