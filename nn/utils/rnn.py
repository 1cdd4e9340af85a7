"""Sequences of different lengths in one tensor."""

from __future__ import annotations

from manygrad.tensor.tensor import Tensor


def pad_sequence(
    sequences: list[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """Sequences (L_i, *) -> (max L, N, *), or (N, max L, *) with batch_first."""
    seqs = list(sequences)
    if not seqs:
        raise ValueError("pad_sequence: no sequences")
    if padding_side not in ("right", "left"):
        raise ValueError(f'pad_sequence: padding_side is "right" or "left", not {padding_side!r}')
    if any(s.ndim == 0 or s.shape[1:] != seqs[0].shape[1:] for s in seqs):
        raise ValueError(f"pad_sequence: all dims after the first must be equal, got {[s.shape for s in seqs]}")
    longest = max(s.shape[0] for s in seqs)
    rows = []
    for s in seqs:
        extra = longest - s.shape[0]
        pads = ((0, extra) if padding_side == "right" else (extra, 0), *((0, 0),) * (s.ndim - 1))
        flat = tuple(p for pair in reversed(pads) for p in pair)
        rows.append(s.pad(flat, value=padding_value) if extra else s)
    dim = 0 if batch_first else 1
    return rows[0].stack(*rows[1:], dim=dim) if len(rows) > 1 else rows[0].unsqueeze(dim)


def unpad_sequence(padded_sequences: Tensor, lengths: list[int], batch_first: bool = False) -> list[Tensor]:
    """The sequences of their lengths again."""
    rows = padded_sequences if batch_first else padded_sequences.transpose(0, 1)
    if len(lengths) != rows.shape[0]:
        raise ValueError(f"unpad_sequence: {rows.shape[0]} sequences, {len(lengths)} lengths")
    return [rows[i, : int(n)] for i, n in enumerate(lengths)]
