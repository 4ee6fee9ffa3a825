"""The thing that runs the model: a stock vLLM server as a watched child, and a tiny model that ships."""
