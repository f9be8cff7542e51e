"""What all tests share: the Hypothesis profiles.

`ci`, the default, derives its examples from the tests alone, so that a run is repeatable. `random`
draws new ones on every run, more of them, and prints how to reproduce a failure: choose it with
`HYPOTHESIS_PROFILE=random`.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("random", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
