"""Make a video from a text: a progress bar while it is made, then an .mp4 file, with its sound if the model makes one.

No model of video ships with the server; add one such as LTX Video as `video`, or name yours with --model:

    diffusion-backend add Lightricks/LTX-Video --name video --dtype bfloat16
"""

import argparse
import json
import queue
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tqdm import tqdm
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

OUTPUTS = ("event", "step", "num_steps", "encoded", "frame_rate", "seeds", "metrics")


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


def events(client, model, inputs):
    """Yield the responses to one request, the last one included; raise what it failed with."""
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    try:
        outputs = [triton.InferRequestedOutput(name) for name in OUTPUTS]
        client.async_stream_infer(model, inputs, outputs=outputs)
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
    """Read the arguments, make the video, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="waves on a beach at sunset")
    parser.add_argument("--url", default="localhost:8001", help="gRPC endpoint (default: %(default)s)")
    parser.add_argument("--model", default="video", help="model that streams (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="denoising steps (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=49, help="frames of the video (default: %(default)s)")
    parser.add_argument("--frame-rate", type=float, help="frames a second; the model's own unless given")
    parser.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="the model's own unless given")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the video (default: %(default)s)")
    args = parser.parse_args()

    inputs = [
        make_input("prompt", args.prompt, "BYTES"),
        make_input("num_inference_steps", args.steps, "INT32"),
        make_input("num_frames", args.frames, "INT32"),
        make_input("output_format", "mp4", "BYTES"),
    ]
    if args.frame_rate is not None:
        inputs.append(make_input("frame_rate", args.frame_rate, "FP32"))
    if args.size is not None:
        inputs += [make_input(name, side, "INT32") for name, side in zip(("height", "width"), args.size, strict=True)]
    try:
        with connect(args.url, args.model) as client, tqdm(total=args.steps, desc=args.prompt, unit="step") as bar:
            for kind, result in events(client, args.model, inputs):
                if kind == "step":
                    bar.update()
                else:
                    answer = result
    except InferenceServerException as error:
        sys.exit(f"error: {error.message()}")

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "video.mp4"
    path.write_bytes(answer.as_numpy("encoded")[0])
    rate, seed = answer.as_numpy("frame_rate")[0], answer.as_numpy("seeds")[0]
    milliseconds = json.loads(answer.as_numpy("metrics")[0])["time_total_ms"]
    print(f"{path}: {rate:g} frames a second, seed {seed}, {milliseconds:.0f} ms in the engine")


if __name__ == "__main__":
    main()
