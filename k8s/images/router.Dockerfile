# Router and operator: no vLLM, no torch. The build context is a folder with the wheel that `make wheel` made (compiled
# modules where the machine allowed them) and the lock of its dependencies.
#   docker build -f k8s/images/router.Dockerfile -t baton/router:0.1.0 dist
FROM python:3.11.14-slim-bookworm AS build
COPY *.whl /dist/
RUN python -m venv /opt/baton \
    && wheel="$(ls /dist/*.whl)" \
    && /opt/baton/bin/pip install --no-cache-dir "${wheel}[k8s]" \
    && rm -rf /opt/baton/bin/pip* /opt/baton/lib/python3.11/site-packages/pip

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 65532 baton && useradd --uid 65532 --gid 65532 --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT []
CMD ["baton", "router", "--help"]
