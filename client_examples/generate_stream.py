"""Watch a picture come over HTTP with nothing but the standard library: server-sent events of /generate_stream."""

import argparse
import base64
import http.client
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path


def events(url, body):
    """Yield the JSON object of each server-sent event."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    request = urllib.request.Request(
        f"http://{url}/v2/models/emoji/generate_stream", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data:"):
                yield json.loads(line.removeprefix(b"data:"))


def main():
    """Read the arguments, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="red apple")
    parser.add_argument("--url", default="localhost:8000", help="HTTP endpoint (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: %(default)s)")
    args = parser.parse_args()

    body = {"prompt": args.prompt, "num_inference_steps": args.steps, "output_format": "png;base64"}
    try:
        for event in events(args.url, body):
            if "error" in event:
                sys.exit(f"error: {event['error']}")
            if event["event"] == "step":
                print(f"step {event['step']} of {event['num_steps']}", flush=True)
    except urllib.error.HTTPError as error:  # a refusal: "data: " and the same JSON, but for its status
        text = error.read().decode(errors="replace").strip().removeprefix("data:")
        try:
            text = json.loads(text)["error"]
        except (ValueError, LookupError, TypeError):
            text = f"{error.code}: {text}"
        sys.exit(f"error: {text}")
    except (OSError, http.client.HTTPException):
        sys.exit(f"error: no server answers HTTP at {args.url}; start it with `make serve`, or name it with --url")

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "generate_stream.png"
    path.write_bytes(base64.b64decode(event["encoded"]))
    print(f"{path}: seed {event['seeds']}")


if __name__ == "__main__":
    main()
