# Builds an image with unisono, for `unisono k8s`:
#
#     docker build --build-arg EXTRAS=wan,wandb -t registry.example.com/unisono:1 .
#
# torch from PyPI brings CUDA's libraries; the machine needs only the NVIDIA driver and its container toolkit.
FROM python:3.12-slim

# The extras of pyproject.toml to install: those of the recipes and trackers that the runs use.
ARG EXTRAS=tune,wandb,mlflow

# The user to whom `unisono k8s --user` refers, and the folder at which it mounts the first volume.
RUN groupadd --gid 1000 unisono \
    && useradd --uid 1000 --gid 1000 --create-home unisono \
    && install --directory --owner=1000 --group=1000 /data

WORKDIR /opt/unisono
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir ".[${EXTRAS}]"

USER 1000:1000
WORKDIR /data
# unisono saves a checkpoint on SIGTERM; as the exec form starts it without a shell, it receives the signal.
STOPSIGNAL SIGTERM
ENTRYPOINT ["unisono"]
CMD ["--help"]
