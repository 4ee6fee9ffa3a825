"""What clients speak: paths, the OpenAI API, aliases, whole paths passed through; the process and its configuration."""
