"""The health check of the container: its exit code is the server's health."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from each import each

SCRIPT = Path(__file__).parents[2] / "docs" / "deploy" / "health.py"


@each(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_tells_the_servers_health(status: int | None, code: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status or 0)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/health"
        if status is None:
            server.server_close()
        else:
            threading.Thread(target=server.handle_request, daemon=True).start()
        done = subprocess.run([sys.executable, SCRIPT], env={"EYAS_HEALTH_URL": url}, capture_output=True, check=False)
    assert done.returncode == code
