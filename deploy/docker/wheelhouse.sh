#!/usr/bin/env bash
# Collect the wheels that the image's build needs, so that it needs no index:
#
#     deploy/docker/wheelhouse.sh FOLDER [PYTHON]
#
# PYTHON (the checkout's .venv/bin/python unless given) must be of the minor version that the base image has.
set -euo pipefail

root=$(dirname "${BASH_SOURCE[0]}")/../..
folder=${1:?usage: wheelhouse.sh FOLDER [PYTHON]}
python=${2:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$folder"
sed -E 's/\[[^]]*\]//' "$root/requirements.lock" >"$work/constraints.txt" # constraints may not have extras
"$python" - "$root/pyproject.toml" >"$work/requirements.txt" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["dependencies"], "setuptools", sep="\n")
PYTHON
"$python" -m pip download --disable-pip-version-check --quiet --only-binary :all: --dest "$folder" \
    --constraint "$work/constraints.txt" --requirement "$work/requirements.txt"
