"""See `tests/cuda/shim/cuda/__init__.py`."""
