"""In the place of the package cuda-bindings, where its folder comes first in PYTHONPATH: emulated GPUs."""
