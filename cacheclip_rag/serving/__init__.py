"""An HTTP server with OpenAI's API over an engine: ``cacheclip serve``.

A request passes the files in this order: ``app.py`` (paths, queue, time limit, streams), ``access.py`` (keys and
tenants), ``schema.py`` with ``field.py`` (what a body may hold), a backend (``backend.py``; ``transformers.py`` answers
with this package's engine), ``replies.py`` (what goes back). ``server.py`` starts and stops it. A second backend uses
all of these but ``transformers.py``.
"""
