"""Command-line tools of the project that are not part of the backend itself."""
