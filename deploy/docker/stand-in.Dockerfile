# Stand-ins for the images that the stack is made of, for machines that reach no registry: see stand-ins.sh.
# The build context is the site-packages folder that holds the nvidia-pytriton wheel.

FROM diffusion-stand-in-root AS triton
# Laid out as NVIDIA's image is: the server, its Python backend and the stub for the system's Python in one tree, and its
# libraries where the loader finds them.
COPY pytriton/tritonserver /opt/tritonserver
COPY nvidia_pytriton.libs /opt/tritonserver/lib
RUN cd /opt/tritonserver \
    && minor=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
    && mv "python_backend_stubs/$minor/triton_python_backend_stub" backends/python/ \
    && rm -r python_backend_stubs \
    && echo /opt/tritonserver/lib >/etc/ld.so.conf.d/tritonserver.conf \
    && ldconfig \
    && useradd --uid 1000 triton-server
ENV PATH=/opt/tritonserver/bin:${PATH} PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/tritonserver

FROM diffusion-stand-in-root AS prometheus
RUN install -d -o 65534 -g 65534 /prometheus
USER 65534:65534
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]

FROM diffusion-stand-in-root AS haproxy
USER 99:99
