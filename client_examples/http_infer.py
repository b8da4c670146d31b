"""Draw one picture with plain HTTP inference: one request, one answer.

`tritonclient.http` cannot stream, so this asks `emoji_unary`, the twin of `emoji` that answers once.
"""

import argparse
import http.client
import json
import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

MODEL = "emoji_unary"


def make_input(name, value, datatype):
    """Return an input for one prompt: shape (1, 1), as the model's first dimension counts the prompts."""
    tensor = triton.InferInput(name, [1, 1], datatype)
    tensor.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(datatype)))
    return tensor


def connect(url):
    """Return a client, or end the program with the remedy."""
    client = triton.InferenceServerClient(url)
    try:
        if client.is_model_ready(MODEL):
            return client
    except (OSError, http.client.HTTPException):
        sys.exit(f"error: no server answers HTTP at {url}; start it with `make serve`, or name another with --url")
    sys.exit(f"error: the server at {url} does not serve the model {MODEL!r}")


def main():
    """Read the arguments, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="red apple")
    parser.add_argument("--url", default="localhost:8000", help="HTTP endpoint (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="makes the same picture again; random unless given")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: %(default)s)")
    args = parser.parse_args()

    inputs = [
        make_input("prompt", args.prompt, "BYTES"),
        make_input("num_inference_steps", args.steps, "INT32"),
        make_input("output_format", "png", "BYTES"),
    ]
    if args.seed is not None:
        inputs.append(make_input("seed", args.seed, "INT64"))
    outputs = [triton.InferRequestedOutput(name) for name in ("encoded", "seeds", "metrics")]

    with connect(args.url) as client:
        try:
            result = client.infer(MODEL, inputs, outputs=outputs)
        except InferenceServerException as error:
            sys.exit(f"error: {error.message()}")
        except (OSError, http.client.HTTPException) as error:
            sys.exit(f"error: the server at {args.url} closed the connection: {error}")

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "http_infer.png"
    path.write_bytes(result.as_numpy("encoded")[0])
    metrics = json.loads(result.as_numpy("metrics")[0])
    print(f"{path}: seed {result.as_numpy('seeds')[0]}, {metrics['time_total_ms']:.0f} ms in the engine")


if __name__ == "__main__":
    main()
