# An engine's pod: vLLM's own image and Baton beside it. The build context is a folder with Baton's wheel.
#   docker build -f k8s/images/engine.Dockerfile -t baton/engine:0.1.0 dist
FROM vllm/vllm-openai:v0.32.0 AS build
COPY *.whl /dist/
RUN wheel="$(ls /dist/*.whl)" && python3 -m pip install --no-cache-dir --target /opt/baton "${wheel}"

FROM vllm/vllm-openai:v0.32.0
COPY --from=build /opt/baton /opt/baton
ENV PYTHONPATH=/opt/baton PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT []
CMD ["baton", "engine", "--help"]
