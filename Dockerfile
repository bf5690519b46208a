# The images of tapforge: operator, trainer, phone, web. `--target` says which; builds share their stages.
#
#   docker build --target operator -t tapforge/operator:dev .
#   docker build --target phone -t tapforge/phone:dev .
#   docker build --target web -t tapforge/web:dev .                              # MiniWoB++ in Chromium
#   docker build --target trainer -t tapforge/trainer:dev .                      # CUDA
#   docker build --target trainer --build-arg TRAINER=cpu -t tapforge/trainer:cpu .
#   docker build --target trainer --build-arg FLASH_ATTN=URL_OF_A_WHEEL -t tapforge/trainer:flash .   # docs/gpus.md
#
# Each runs as user 65532 and needs to write nowhere but in /tmp. What is installed is pinned by requirements/ (make lock).
# BASE is any Debian 12: one that has Python 3.11 already needs no package repository.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS base
RUN command -v python3 > /dev/null || { \
        apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 && \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin; }
# Libraries ask for the name and the home of whoever runs them, and 65532 has none.
ENV PATH=/opt/tapforge/bin:/usr/local/bin:/usr/bin:/bin \
    USER=tapforge \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# pip and the builder of our own package: in no image that runs.
FROM base AS tools
RUN python3 -c "import ensurepip" 2> /dev/null || { apt-get update && apt-get install -y --no-install-recommends python3-venv; }
COPY requirements/build.txt /requirements/
RUN python3 -m venv /opt/tools && \
    /opt/tools/bin/pip install --no-cache-dir --no-deps -r /requirements/build.txt && \
    python3 -m venv --without-pip /opt/tapforge
ENV PATH=/opt/tools/bin:/usr/local/bin:/usr/bin:/bin

# Our own code: a small layer of its own, on top of what seldom changes.
FROM tools AS code
COPY pyproject.toml README.md LICENSE /source/
COPY requirements/trainer-cpu.txt requirements/trainer-gpu.txt /source/requirements/
COPY manifests/samples /source/manifests/samples
COPY crds/emulatorpools.yaml crds/trainingruns.yaml /source/crds/
COPY crds/tapforge_api /source/crds/tapforge_api
COPY operator/tapforge_operator /source/operator/tapforge_operator
COPY trainer/tapforge_envs /source/trainer/tapforge_envs
COPY trainer/tapforge_trainer /source/trainer/tapforge_trainer
RUN pip wheel --quiet --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels /source && \
    pip --python /opt/tapforge/bin/python install --no-cache-dir --no-deps /wheels/*.whl

FROM tools AS operator-packages
COPY requirements/operator.txt /requirements/
RUN pip --python /opt/tapforge/bin/python install --no-cache-dir --no-deps -r /requirements/operator.txt

FROM tools AS phone-packages
COPY requirements/phone.txt /requirements/
RUN pip --python /opt/tapforge/bin/python install --no-cache-dir --no-deps -r /requirements/phone.txt

FROM tools AS web-packages
COPY requirements/web.txt /requirements/
RUN pip --python /opt/tapforge/bin/python install --no-cache-dir --no-deps -r /requirements/web.txt

FROM tools AS trainer-packages
ARG TRAINER=gpu
# URL of a wheel of flash-attn that is built for the torch in requirements/trainer-gpu.txt (learner.attention); none: without.
ARG FLASH_ATTN=
COPY requirements/trainer-${TRAINER}.txt /requirements/
RUN pip --python /opt/tapforge/bin/python install --no-cache-dir --no-deps -r /requirements/trainer-${TRAINER}.txt && \
    if [ -n "${FLASH_ATTN}" ]; then \
        pip --python /opt/tapforge/bin/python install --no-cache-dir --no-deps "${FLASH_ATTN}"; fi

FROM base AS operator
COPY --from=operator-packages /opt/tapforge /opt/tapforge
COPY --from=code /opt/tapforge /opt/tapforge
USER 65532:65532
EXPOSE 8443 8080
CMD ["tapforge-operator"]

FROM base AS phone
COPY --from=phone-packages /opt/tapforge /opt/tapforge
COPY --from=code /opt/tapforge /opt/tapforge
USER 65532:65532
EXPOSE 8000
CMD ["python", "-m", "tapforge_envs.phone.server", "--host=::", "--port=8000", "--slots=1"]

# MiniWoB++'s pages: the browser, and the fonts that the pages were made for.
FROM base AS web
RUN apt-get update && \
    apt-get install -y --no-install-recommends chromium fonts-liberation && \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY --from=web-packages /opt/tapforge /opt/tapforge
COPY --from=code /opt/tapforge /opt/tapforge
USER 65532:65532
EXPOSE 8000
CMD ["python", "-m", "tapforge_envs.web.server", "--host=::", "--port=8000", "--slots=1"]

# KubeRay asks its workers how they are with wget; kernels are compiled when they are first needed, which takes a compiler
# and Python's headers; numa and gomp are what vLLM's CPU kernels are linked with.
FROM base AS trainer
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 python3-dev wget && \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY --from=trainer-packages /opt/tapforge /opt/tapforge
COPY --from=code /opt/tapforge /opt/tapforge
USER 65532:65532
CMD ["tapforge", "--help"]
