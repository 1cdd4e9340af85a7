"""manygrad: a distributed multi-node training runtime."""
