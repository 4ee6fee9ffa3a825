"""A small Llama that ships in the repository, so that everything runs with no GPU and no download.

vLLM serves it under the name `baton-tiny`. It knows about a hundred answers by heart, half of them about LLM serving,
tells little stories, and mostly says so when it does not know. `README.md` has its size, its training and its samples.
Importing this package reads no file and loads no library.
"""

import pathlib

NAME = "baton-tiny"
"""The name under which it is served."""


def model_path() -> pathlib.Path:
    """Return the folder that holds the weights, the configuration and the tokenizer."""
    return pathlib.Path(__file__).parent / "model"
