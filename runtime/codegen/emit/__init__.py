"""From the loop tree to instructions: `lower.py` walks the tree; the other files make what stands in a tile."""
