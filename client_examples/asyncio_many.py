"""Draw many prompts at once with asyncio, of different lengths, and at most so many in flight.

The server batches them step by step: a short request among long ones leaves as soon as it is done.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

MODEL = "emoji_unary"
PROMPTS = ["red apple", "blue heart", "pizza", "cat face", "rocket", "snowman", "sunflower", "octopus"]
STEPS = (8, 20, 40)


def make_input(name, value, datatype):
    """Return an input for one prompt: shape (1, 1), as the model's first dimension counts the prompts."""
    tensor = triton.InferInput(name, [1, 1], datatype)
    tensor.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(datatype)))
    return tensor


async def draw(client, in_flight, prompt, steps, path):
    """Draw one prompt when there is room, and save it."""
    inputs = [
        make_input("prompt", prompt, "BYTES"),
        make_input("num_inference_steps", steps, "INT32"),
        make_input("output_format", "png", "BYTES"),
    ]
    outputs = [triton.InferRequestedOutput(name) for name in ("encoded", "metrics")]
    async with in_flight:
        result = await client.infer(MODEL, inputs, outputs=outputs)
    path.write_bytes(result.as_numpy("encoded")[0])
    metrics = json.loads(result.as_numpy("metrics")[0])
    print(f"{path}: {prompt}, {steps} steps, {metrics['time_total_ms']:.0f} ms in the engine", flush=True)


async def draw_all(args):
    """Draw all prompts; the first one that fails stops the others."""
    args.out.mkdir(parents=True, exist_ok=True)
    in_flight = asyncio.Semaphore(args.concurrency)
    async with triton.InferenceServerClient(args.url) as client:
        try:
            ready = await client.is_model_ready(MODEL)
        except InferenceServerException:
            sys.exit(f"error: no server answers gRPC at {args.url}; start it with `make serve`, or name it with --url")
        if not ready:
            sys.exit(f"error: the server at {args.url} does not serve the model {MODEL!r}")
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for i, (prompt, steps) in enumerate(zip(args.prompts, itertools.cycle(STEPS), strict=False)):
                group.create_task(draw(client, in_flight, prompt, steps, args.out / f"asyncio_many-{i:02}.png"))
        print(f"{len(args.prompts)} pictures in {time.perf_counter() - begin:.1f} s")


def positive(text):
    """Return an argument as a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not allowed; it must be at least 1")
    return number


def main():
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="one or more (default: eight of our own)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC endpoint (default: %(default)s)")
    parser.add_argument("--concurrency", type=positive, default=4, help="most in flight (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures (default: %(default)s)")
    try:
        asyncio.run(draw_all(parser.parse_args()))
    except* InferenceServerException as errors:
        sys.exit(f"error: {errors.exceptions[0].message()}")


if __name__ == "__main__":
    main()
