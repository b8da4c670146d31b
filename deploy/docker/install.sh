#!/usr/bin/env bash
# The steps of the image's build that install something; run inside it.
#
#     install.sh build          makes the package's wheel in /dist, in a folder with the sources
#     install.sh dependencies   installs what the package needs at run time, at the locked versions, into /opt/venv
#     install.sh package        installs the wheel from /dist
#
# Where /wheelhouse holds wheels, they are all that is used; else the index is asked.
set -euo pipefail

venv=/opt/venv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

options=(--no-cache-dir --disable-pip-version-check --root-user-action ignore)
if compgen -G '/wheelhouse/*.whl' >/dev/null; then
    options+=(--no-index --find-links /wheelhouse)
fi

# NVIDIA's images have no ensurepip, so the image's own pip installs into the environment.
install() { python3 -m pip --python "$venv/bin/python" install "${options[@]}" "$@"; }

case $1 in
build)
    python3 -m pip install "${options[@]}" --target "$work" "$(grep '^setuptools==' requirements.lock)"
    PYTHONPATH=$work python3 -m pip wheel --no-deps --no-build-isolation --wheel-dir /dist .
    ;;
dependencies)
    python3 -m venv --without-pip "$venv"
    sed -E 's/\[[^]]*\]//' requirements.lock >"$work/constraints.txt" # constraints may not have extras
    python3 - >"$work/requirements.txt" <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["dependencies"], sep="\n")
PYTHON
    install --no-compile --constraint "$work/constraints.txt" --requirement "$work/requirements.txt"
    # Compiled here, by all processors at once, as the server may not write there later. The packages' own tests are left
    # out: they are not run, and some are not for this Python.
    "$venv/bin/python" -m compileall -q -j 0 -x '/(tests?|testing)/' "$venv/lib"
    ;;
package)
    install --no-deps /dist/*.whl
    "$venv/bin/python" -c 'import diffusion_backend.serve.__main__'
    ;;
*)
    echo "install.sh: '$1' is neither build nor dependencies nor package" >&2
    exit 2
    ;;
esac
