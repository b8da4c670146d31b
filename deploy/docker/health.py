"""Exit with 0 if the server in this container takes requests: the image's health check. Standard library only."""

import http.client
import os
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("HTTP_PORT", "8000")), timeout=4)
try:
    connection.request("GET", "/v2/health/ready")
    sys.exit(connection.getresponse().status != 200)
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"not ready: {error}")
