"""Make sounds from a text and save each as a .wav file: one request, one answer, over gRPC.

No model of sound ships with the server; add one such as Stable Audio as `sound`, or name yours with --model:

    diffusion-backend add stabilityai/stable-audio-open-1.0 --name sound
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype


def make_input(name, value, datatype):
    """Return an input for one prompt: shape (1, 1), as the model's first dimension counts the prompts."""
    tensor = triton.InferInput(name, [1, 1], datatype)
    tensor.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(datatype)))
    return tensor


def connect(url, model):
    """Return a client, or end the program with the remedy."""
    client = triton.InferenceServerClient(url)
    try:
        if client.is_model_ready(model):
            return client
    except InferenceServerException:
        sys.exit(f"error: no server answers gRPC at {url}; start it with `make serve`, or name another with --url")
    sys.exit(f"error: the server at {url} does not serve the model {model!r}; name another with --model")


def main():
    """Read the arguments, make the sounds, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="a church bell, far away")
    parser.add_argument("--url", default="localhost:8001", help="gRPC endpoint (default: %(default)s)")
    parser.add_argument("--model", default="sound_unary", help="model that answers once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each sound (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps (default: %(default)s)")
    parser.add_argument("--number", type=int, default=1, help="number of sounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the sounds (default: %(default)s)")
    args = parser.parse_args()

    inputs = [
        make_input("prompt", args.prompt, "BYTES"),
        make_input("duration_s", args.seconds, "FP32"),
        make_input("num_inference_steps", args.steps, "INT32"),
        make_input("num_outputs_per_prompt", args.number, "INT32"),
        make_input("output_format", "wav", "BYTES"),
    ]
    outputs = [triton.InferRequestedOutput(name) for name in ("encoded", "sample_rate", "seeds", "metrics")]
    with connect(args.url, args.model) as client:
        try:
            result = client.infer(args.model, inputs, outputs=outputs)
        except InferenceServerException as error:
            sys.exit(f"error: {error.message()}")

    args.out.mkdir(parents=True, exist_ok=True)
    rate = result.as_numpy("sample_rate")[0]
    for number, (data, seed) in enumerate(zip(result.as_numpy("encoded"), result.as_numpy("seeds"), strict=True), 1):
        path = args.out / f"sound-{number}.wav"
        path.write_bytes(data)
        print(f"{path}: {rate} Hz, seed {seed}")
    print(f"{json.loads(result.as_numpy('metrics')[0])['time_total_ms']:.0f} ms in the engine")


if __name__ == "__main__":
    main()
