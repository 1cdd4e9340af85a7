"""`python -m tests.endurance`: see runner.py. The settings of the test suite hold here, too."""

import sys

import tests.conftest  # noqa: F401  (before manygrad: SPEC and a cache folder of its own)
from tests.endurance.runner import main

sys.exit(main())
