"""The Triton layer: the only part that knows Triton's Python backend.

`model.py` in a repository of models is two lines: it names one of these classes `TritonPythonModel`. Importing this
package is light; torch and diffusers are imported when a model is initialized, since Triton also starts a process only
to complete the configuration.
"""

from .streaming import StreamingModel
from .unary import UnaryModel

__all__ = ["StreamingModel", "UnaryModel"]
