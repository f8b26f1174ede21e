"""Reading back what a report's page shows."""

from __future__ import annotations

import json
import re
from typing import Any


def data_in(page: str) -> dict[str, Any]:
    """The data as the page's script reads them."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
