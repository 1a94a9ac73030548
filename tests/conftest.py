"""One thread a process: small tensors gain nothing from more, and tests run side by side."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
