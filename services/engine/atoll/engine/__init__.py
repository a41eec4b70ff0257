"""Launches the serving engine: SGLang, with or without a GPU. Run it with `python -m atoll.engine`."""
