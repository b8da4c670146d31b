"""Send requests to the models of the tests."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Mapping


def generate(url: str, text: str, delay_s: float = 0.0, model: str = "echo") -> str:
    """Let the model answer ``text`` after ``delay_s`` seconds, and return its answer."""
    body = json.dumps({"text": text, "delay_s": delay_s}).encode()
    request = urllib.request.Request(f"{url}/v2/models/{model}/generate", body)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["text"]


def post(url: str, path: str, headers: Mapping[str, str]) -> None:
    """Send an empty POST, such as those of the repository API, which need the key among the headers."""
    with urllib.request.urlopen(urllib.request.Request(url + path, b"{}", dict(headers)), timeout=60) as response:
        response.read()


class Pending:
    """A request that is under way in a thread."""

    def __init__(self, url: str, delay_s: float, model: str = "echo") -> None:
        self.answer: str | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(url, delay_s, model), daemon=True)
        self._thread.start()

    def _run(self, url: str, delay_s: float, model: str) -> None:
        try:
            self.answer = generate(url, "late", delay_s, model)
        except Exception as error:
            self.answer = error

    def wait(self) -> str | Exception | None:
        self._thread.join(60)
        return self.answer
