"""Everything that knows `diffusers`: loading, probing, running, and the layout of a denoiser's rows.

Imports torch and diffusers; import it late where start-up time matters.
"""
