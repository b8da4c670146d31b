"""Cancel a long request after a few steps, and see that the server has really stopped working on it."""

import argparse
import queue
import sys
import time
import urllib.request

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

MODEL = "emoji"


def make_input(name, value, datatype):
    """Return an input for one prompt: shape (1, 1), as the model's first dimension counts the prompts."""
    tensor = triton.InferInput(name, [1, 1], datatype)
    tensor.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(datatype)))
    return tensor


def count_cancelled(metrics_url):
    """Return how many requests the server counts as cancelled."""
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=5) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("diffusion_requests_total") and f'model="{MODEL}"' in line and "cancelled" in line:
                return float(line.split()[-1])
    return 0.0


def main():
    """Start a request, cancel it, ask the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="red apple")
    parser.add_argument("--url", default="localhost:8001", help="gRPC endpoint (default: %(default)s)")
    parser.add_argument("--metrics-url", default="localhost:8002", help="metrics endpoint (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the request (default: %(default)s)")
    parser.add_argument("--after", type=int, default=5, help="steps before it is cancelled (default: %(default)s)")
    args = parser.parse_args()
    if not 0 < args.after < args.steps:
        parser.error(f"--after: {args.after} is not allowed; it must be from 1 to {args.steps - 1}, less than --steps")

    client = triton.InferenceServerClient(args.url)
    responses = queue.Queue()
    inputs = [make_input("prompt", args.prompt, "BYTES"), make_input("num_inference_steps", args.steps, "INT32")]
    try:
        if not client.is_model_ready(MODEL):
            sys.exit(f"error: the server at {args.url} does not serve the model {MODEL!r}")
        before = count_cancelled(args.metrics_url)
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(MODEL, inputs)
        step = 0
        while step < args.after:
            result, error = responses.get()
            if error is not None:
                sys.exit(f"error: {error.message()}")
            step = int(result.as_numpy("step")[0])
            print(f"step {step} of {args.steps}")
    except (OSError, InferenceServerException):
        sys.exit(
            f"error: no server answers at {args.url} and {args.metrics_url}; start it with `make serve`, "
            "or name it with --url and --metrics-url"
        )
    client.stop_stream(cancel_requests=True)
    while error is None:  # steps that were under way
        result, error = responses.get()
    print(f"client: {error.status()}")

    deadline = time.monotonic() + 30
    while count_cancelled(args.metrics_url) == before:  # the server stops at the request's next step
        if time.monotonic() > deadline:
            sys.exit("error: the server still works on the request")
        time.sleep(0.05)
    print("server: CANCELLED, it has stopped working on the request")


if __name__ == "__main__":
    main()
