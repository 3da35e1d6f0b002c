"""Lets the tests here find the test bed, whose layout only `tools/paths.py` knows."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
