"""A long run of mixed requests against a real server: does it lose, leak or miscount anything? `python -m tools.soak`.

`mix` says what is sent, `calls` sends it, `books` compares the server's metrics with what the client counted, `watch`
reads memory, descriptors, threads and shared memory, `checks` judges, `run` puts them together, `report` writes.
"""
