# Router and operator: no vLLM, no torch, compiled. The build context is dist/, as `make wheel` makes it: the wheel with
# the compiled modules, and the lock of what it imports, with hashes. PIP_INDEX_URL and the like may be given as build
# arguments where the index is another one.
#   make wheel && docker build -f k8s/images/router.Dockerfile -t baton/router:0.1.0 dist
# The base is named by its version; to name it by its digest: --build-context or FROM python@sha256:...
FROM python:3.11.14-slim-bookworm AS build
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY requirements.txt *.whl /dist/
RUN python -m venv /opt/baton \
    && /opt/baton/bin/pip install --no-cache-dir --no-deps --require-hashes -r /dist/requirements.txt \
    && PIP_NO_INDEX=1 PIP_FIND_LINKS=/dist /opt/baton/bin/pip install --no-cache-dir --no-deps baton-serve==0.1.0 \
    && /opt/baton/bin/python -m compileall -q /opt/baton/lib \
    && rm -rf /opt/baton/bin/pip* /opt/baton/lib/python3.11/site-packages/pip /opt/baton/lib/python3.11/site-packages/pip-*

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 65532 baton && useradd --uid 65532 --gid 65532 --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT []
CMD ["baton", "router", "--help"]
