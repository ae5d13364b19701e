"""Hypothesis profiles: few examples by default, more by FUSECHECK_EXAMPLES, the same ones every time in CI."""

from __future__ import annotations

import os

from hypothesis import settings

EXAMPLES = int(os.environ.get("FUSECHECK_EXAMPLES", "30"))

settings.register_profile("default", max_examples=EXAMPLES, deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
