"""A program that makes millions of objects has Python look for cycles among them rarely."""

import gc


def collect_rarely() -> None:
    """After a million new objects, not after 700: modules, graphs and vocabularies have no cycles, and looking through
    them takes a tenth of the time to the first token. For programs: it holds for the whole process."""
    gc.set_threshold(1_000_000)
