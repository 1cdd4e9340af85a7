"""Bytes as the command line has them."""


def nbytes_of(text: str) -> int:
    """`64K` -> 65536."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1].upper())
    return int(text) if unit is None else int(text[:-1]) << unit


def text_of(nbytes: int) -> str:
    for unit, bits in (("M", 20), ("K", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes >> bits}{unit}"
    return str(nbytes)
