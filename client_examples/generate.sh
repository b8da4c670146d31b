#!/usr/bin/env bash
# Draw one picture with curl: POST /v2/models/emoji_unary/generate, and decode the PNG from the JSON answer.
set -euo pipefail

usage="usage: generate.sh [--url HOST:PORT] [--steps N] [--out FOLDER] [PROMPT]"
url=localhost:8000 steps=20 out=out prompt="red apple"
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) echo "$usage" && exit 0 ;;
        --url) url=${2:?"$usage"} && shift 2 ;;
        --steps) steps=${2:?"$usage"} && shift 2 ;;
        --out) out=${2:?"$usage"} && shift 2 ;;
        -*) echo "$usage" >&2 && exit 2 ;;
        *) prompt=$1 && shift ;;
    esac
done
[[ $steps =~ ^-?[0-9]+$ ]] || { echo "error: --steps: '$steps' is not a number" >&2 && exit 2; }

# Python writes the JSON, so that a prompt may hold quotes.
body=$(python3 -c 'import json, sys
print(json.dumps({"prompt": sys.argv[1], "num_inference_steps": int(sys.argv[2]), "output_format": "png;base64"}))' \
    "$prompt" "$steps")

if ! answer=$(curl --silent --show-error --header "Content-Type: application/json" --data "$body" \
    "http://$url/v2/models/emoji_unary/generate"); then
    echo "error: no server answers HTTP at $url; start it with \`make serve\`, or name another with --url" >&2
    exit 1
fi

mkdir -p "$out"
python3 -c 'import base64, json, sys
answer = json.load(sys.stdin)
if "error" in answer:
    sys.exit("error: " + answer["error"])
with open(sys.argv[1], "wb") as file:
    file.write(base64.b64decode(answer["encoded"]))
print(sys.argv[1] + ": seed", answer["seeds"])' "$out/generate.png" <<<"$answer"
