# Rungs for NVIDIA GPUs. The image has CUDA, the host has the driver (580 or newer) and NVIDIA's
# container toolkit. Its user, 1000, must be allowed to write into the mounted folders.
#
#   docker build -t rungs .
#   docker run --rm --gpus all --shm-size 1g -v "$PWD/runs:/rungs/runs" \
#     -v "$PWD/datasets:/rungs/datasets" rungs train.py runs/layers
#
# --build-arg EXTRA=cuda12 is for older drivers, EXTRA=tpu for TPUs.
FROM python:3.11-slim-bookworm

RUN pip install --no-cache-dir uv==0.13.9

RUN useradd --uid 1000 --create-home rungs && install -d -o rungs /rungs
USER 1000
WORKDIR /rungs

ARG EXTRA=cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    UV_NO_CACHE=1 \
    UV_PYTHON_DOWNLOADS=never

# The libraries are a layer of their own, which a change of the code leaves as it is.
COPY --chown=rungs pyproject.toml ./
RUN uv sync --no-dev --no-install-project --extra "$EXTRA"
COPY --chown=rungs . .
RUN uv sync --no-dev --extra "$EXTRA"

ENV UV_NO_SYNC=1
ENTRYPOINT ["uv", "run"]
CMD ["train.py", "--help"]
