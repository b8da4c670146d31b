#!/usr/bin/env bash
# Make stand-ins for the base images out of Debian's packages and the nvidia-pytriton wheel, for machines that reach no
# registry, and tag them as the variables say:
#
#     TRITON_IMAGE=... PROMETHEUS_IMAGE=... HAPROXY_IMAGE=... deploy/docker/stand-ins.sh CACHE_FOLDER
#
# Needs root, debootstrap, a Docker engine, and the project's virtual environment. The root file system is kept in the
# cache folder and made once. What a stand-in cannot prove is in docs/deploy.md.
set -euo pipefail

cache=$(realpath -m -- "${1:?usage: stand-ins.sh CACHE_FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
suite=bookworm
archive=$cache/root-$suite.tar

if [ ! -f "$archive" ]; then
    mkdir -p "$cache"
    root=$(mktemp -d -p "$cache")
    trap 'rm -rf --one-file-system "$root"' EXIT # debootstrap that fails may leave something mounted
    debootstrap --variant=minbase \
        --include=ca-certificates,haproxy,libpython3.11,prometheus,python3,python3-pip,wget "$suite" "$root/root" >"$cache/debootstrap.log"
    tar -C "$root/root" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./usr/share/doc/*' \
        --exclude='./dev/*' -cf "$root/root.tar" .
    mv "$root/root.tar" "$archive"
fi
docker import "$archive" diffusion-stand-in-root >/dev/null

site_packages=$(dirname "$(.venv/bin/python -c 'from diffusion_backend.serve.layout import find_wheel; print(find_wheel())')")
for target in triton prometheus haproxy; do
    variable=${target^^}_IMAGE
    DOCKER_BUILDKIT=1 docker build --quiet --file deploy/docker/stand-in.Dockerfile --target "$target" \
        --tag "${!variable:?}" "$site_packages" >/dev/null
done
