#!/usr/bin/env bash
# Make a certificate to try TLS with, signed by itself, good for 30 days:
#
#     deploy/proxy/make-certificate.sh [FOLDER [NAME...]]     NAMEs: localhost unless given; 127.0.0.1 is always in it
#
# FOLDER (certificates beside this file) gets server.pem, the certificate with its key, which the proxy reads, and ca.pem,
# the certificate alone, which clients trust. In production put a real certificate chain and its key in server.pem.
set -euo pipefail

folder=${1:-$(dirname "${BASH_SOURCE[0]}")/certificates}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=(localhost)
proxy_user=${PROXY_USER:-99:99} # as in docker-compose.yml

mkdir -p "$folder"
umask 077
alternatives=$(printf 'DNS:%s,' "${names[@]}")IP:127.0.0.1
said=$(openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj "/CN=${names[0]}" \
    -addext "subjectAltName=$alternatives" -keyout "$folder/key.pem" -out "$folder/ca.pem" 2>&1) || {
    echo "$said" >&2
    exit 1
}
cat "$folder/ca.pem" "$folder/key.pem" >"$folder/server.pem"
rm "$folder/key.pem"
chmod 644 "$folder/ca.pem"
if [ "$(id -u)" -eq 0 ]; then
    chown "$proxy_user" "$folder/server.pem" # the proxy is not root
elif [ "$(id -u)" -ne "${proxy_user%%:*}" ]; then
    echo "The proxy must be able to read $folder/server.pem: set PROXY_USER=$(id -u):$(id -g) for Compose." >&2
fi
