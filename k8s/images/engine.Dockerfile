# An engine's pod: vLLM's own image and Baton beside it. The build context is dist/, as `make wheel` makes it. What vLLM's
# image has already is taken from there and never shadowed; the rest comes from requirements-engine.txt, with hashes.
# pip takes the compiled wheel if it is for the image's Python, else the plain one, which is fast enough for an agent.
#   make wheel && docker build -f k8s/images/engine.Dockerfile -t baton/engine:0.1.0 dist
FROM vllm/vllm-openai:v0.32.0 AS build
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY requirements-engine.txt *.whl plain/*.whl /dist/
RUN python3 -m venv --system-site-packages /opt/baton \
    && /opt/baton/bin/pip install --no-cache-dir --no-deps --require-hashes -r /dist/requirements-engine.txt \
    && PIP_NO_INDEX=1 PIP_FIND_LINKS=/dist /opt/baton/bin/pip install --no-cache-dir --no-deps baton-serve==0.1.0

FROM vllm/vllm-openai:v0.32.0
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT []
CMD ["baton", "engine", "--help"]
