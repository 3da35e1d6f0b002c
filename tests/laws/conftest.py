"""Puts the oracle, which lies beside the laws, within their reach."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
