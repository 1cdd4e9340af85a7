"""A server that speaks OpenAI's API: `python -m manygrad.llm.serve`."""
