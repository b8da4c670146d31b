"""The command line `diffusion-backend`: put a pipeline into a repository of models, list what is there, try it.

    app         the commands and their options
    console     where texts go, and how an error becomes one line
    parameters  one option for every parameter of a model
    source      finds a pipeline, in a folder or on the hub
    preview     what a pipeline takes and gives, told without its weights
    template    the texts of config.pbtxt and model.py
    add         writes the folders of a model
    repository  reads a repository of models
    listing     the table of `list`
    meter       an executor that notes what each forward took
    measure     runs requests alone and together for `check`
    compare     outputs with outputs
    result      what `check` finds out
    verdict     the page that `check` prints

Only what a command needs is imported when it runs: torch and diffusers take seconds.
"""

from .app import main

__all__ = ["main"]
