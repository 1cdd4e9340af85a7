"""Imported before all that is large: Python looks for cycles after a million new objects, not after 700. Modules,
graphs and vocabularies have none, and looking through them takes a tenth of the time to the first token.
"""

import gc

gc.set_threshold(1_000_000)
