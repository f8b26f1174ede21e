"""One compute thread per test process: tiny tensors gain nothing from more, and processes fight over the cores."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
