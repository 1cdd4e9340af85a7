"""The same models trained by ours, torch and tinygrad, each in a process of its own: what several benchmarks share."""
