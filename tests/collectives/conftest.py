"""Lets the tests of this folder import its helper modules (`collective_workers`, `collective_tasks`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
