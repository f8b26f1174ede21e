"""The device that this test session computes on: `pytest --device cpu | simulated | cuda`.

Suites marked `device` run on any; on an accelerator only they are collected. What they build takes `DEVICE`, and what
they compare is brought to main memory.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("PACELINE_TEST_DEVICE", "cpu")
"""As torch and `trainer.device` know it. Set by conftest.py before this file is imported, for children too."""
ON_CPU = DEVICE == "cpu"
