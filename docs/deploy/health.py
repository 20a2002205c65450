"""Exit code 0 if the server beside it accepts requests: for a container's health check, which has no curl."""

import os
import sys
from urllib.request import urlopen

try:
    with urlopen(os.environ.get("EYAS_HEALTH_URL", "http://127.0.0.1:8000/health"), timeout=4) as reply:
        sys.exit(0 if reply.status == 200 else 1)
except OSError as error:  # refused, silent, or a 503
    sys.exit(f"not healthy: {error}")
