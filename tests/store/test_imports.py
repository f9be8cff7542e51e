"""What is imported before the store serves, and not while requests wait."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import numpy as np
import kvpool.store.store
before = set(sys.modules)
np.unique([2, 1, 1])
np.isin([1], [1, 2])
np.setdiff1d([1], [2])
np.partition([2, 1], 0)
np.lexsort(([1], [2]))
print(*sorted(set(sys.modules) - before))
"""


def test_numpys_functions_import_nothing_at_their_first_call() -> None:
    late = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert late.stdout.split() == []
