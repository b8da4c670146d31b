"""Draw one picture over gRPC and watch it come: a progress bar, previews, the picture, and where the time went."""

import argparse
import json
import queue
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tqdm import tqdm
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

MODEL = "emoji"
OUTPUTS = ("event", "step", "num_steps", "encoded", "seeds", "metrics")


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
    except InferenceServerException:
        sys.exit(f"error: no server answers gRPC at {url}; start it with `make serve`, or name another with --url")
    sys.exit(f"error: the server at {url} does not serve the model {MODEL!r}")


def events(client, inputs):
    """Yield the responses to one request, the last one included; raise what it failed with."""
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    try:
        outputs = [triton.InferRequestedOutput(name) for name in OUTPUTS]
        client.async_stream_infer(MODEL, inputs, outputs=outputs)
        kind = None
        while kind != "finished":
            result, error = responses.get()
            if error is not None:
                raise error
            kind = result.as_numpy("event")[0].decode()
            yield kind, result
    finally:
        client.stop_stream(cancel_requests=True)  # also when the consumer leaves early: then the server stops, too


def main():
    """Read the arguments, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="red apple")
    parser.add_argument("--url", default="localhost:8001", help="gRPC endpoint (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default: %(default)s)")
    parser.add_argument(
        "--preview-interval", type=int, default=5, help="steps between previews, 0 for none (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures (default: %(default)s)")
    args = parser.parse_args()

    inputs = [
        make_input("prompt", args.prompt, "BYTES"),
        make_input("num_inference_steps", args.steps, "INT32"),
        make_input("preview_interval", args.preview_interval, "INT32"),
        make_input("output_format", "png", "BYTES"),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with connect(args.url) as client, tqdm(total=args.steps, desc=args.prompt, unit="step") as bar:
            for kind, result in events(client, inputs):
                if kind == "step":
                    bar.update()
                else:  # a preview, or the end
                    name = "grpc_stream.png" if kind == "finished" else f"grpc_stream-step{bar.n:02}.png"
                    (args.out / name).write_bytes(result.as_numpy("encoded")[0])
    except InferenceServerException as error:
        sys.exit(f"error: {error.message()}")

    print(f"{args.out / 'grpc_stream.png'}: seed {result.as_numpy('seeds')[0]}")
    for name, value in json.loads(result.as_numpy("metrics")[0]).items():
        if name.startswith("time_"):
            print(f"  {name:24} {value:8.1f}")


if __name__ == "__main__":
    main()
