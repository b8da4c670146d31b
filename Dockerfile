# The server of this repository: NVIDIA's Triton, this package and what it needs at run time, the models that ship.
#
#     docker build -t diffusion-backend .
#
# Without an index: a folder of wheels (deploy/docker/wheelhouse.sh) given as an image that holds nothing else,
#
#     tar -C wheelhouse -c . | docker import - wheelhouse
#     docker build -t diffusion-backend --build-arg WHEELHOUSE=wheelhouse .
#
# or, with buildx, as a build context: --build-context wheelhouse=./wheelhouse.

ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-py3
ARG WHEELHOUSE=scratch

FROM ${WHEELHOUSE} AS wheelhouse

FROM ${TRITON_IMAGE} AS build
WORKDIR /src
COPY deploy/docker/install.sh pyproject.toml requirements.lock LICENSE README.md ./
COPY backend_src backend_src
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse bash install.sh build
COPY deploy/docker/health.py /opt/diffusion/health.py
COPY models/emoji /opt/diffusion/models/emoji
COPY model_repository /opt/diffusion/model_repository
# Readable by the image's user, whatever the files' rights are where it is built.
RUN chmod -R a+rX /opt/diffusion

FROM ${TRITON_IMAGE}
USER root
# A further index, such as https://download.pytorch.org/whl/cpu for a small image without CUDA.
ARG PIP_EXTRA_INDEX_URL=""
# The dependencies are a layer of their own: a change of the code does not install them again.
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    --mount=type=bind,source=deploy/docker/install.sh,target=/src/install.sh \
    --mount=type=bind,source=pyproject.toml,target=/src/pyproject.toml \
    --mount=type=bind,source=requirements.lock,target=/src/requirements.lock \
    cd /src && bash install.sh dependencies
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    --mount=type=bind,source=deploy/docker/install.sh,target=/src/install.sh \
    bash /src/install.sh package
# NVIDIA's images have this user; the number is named below so that Kubernetes can see that it is not root. A volume for
# weights from the hub and compiled kernels is writable for it because the folder is.
RUN (id -u 1000 >/dev/null 2>&1 || useradd --uid 1000 --no-create-home triton-server) \
    && install -d -o 1000 -g 1000 /var/cache/diffusion
COPY --from=build /opt/diffusion /opt/diffusion

ENV PATH=/opt/venv/bin:${PATH} \
    TRITON_SERVER_DIR=/opt/tritonserver \
    MODEL_REPOSITORY=/opt/diffusion/model_repository \
    HOST=0.0.0.0 \
    METRICS_ADDRESS=0.0.0.0 \
    HOME=/tmp \
    HF_HOME=/var/cache/diffusion \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/diffusion/torchinductor \
    TRITON_CACHE_DIR=/var/cache/diffusion/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

USER 1000:1000
WORKDIR /opt/diffusion
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["python3", "-I", "-S", "/opt/diffusion/health.py"]
STOPSIGNAL SIGTERM
# In place of NVIDIA's entry point, which prints a banner; arguments given to the container go to the launcher.
ENTRYPOINT ["python3", "-m", "diffusion_backend.serve"]
