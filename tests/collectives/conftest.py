"""Lets the tests of this folder import its helper modules (`workers`, `tasks`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
