"""Many texts at once: steps of a model, captured once, and who writes by them."""
