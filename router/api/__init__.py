"""What clients speak: paths, the OpenAI API, aliases, passthrough of whole paths; the process and its configuration."""
