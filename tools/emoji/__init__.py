"""The small text-to-emoji model: its training (`train`) and its quality report (`report`)."""

import os

# Must be set before PyTorch is loaded. Threads that wait for each other actively take the cores from
# the threads that they wait for as soon as the machine has other work: a step then takes 20 times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
