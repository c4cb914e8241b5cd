"""OpenAI's API by vLLM's own server, which is not changed: ``cacheclip serve --backend vllm``.

``launch.py`` checks the options (``options.py``) and replaces this process by vLLM's server, with our connector and the
middleware. A request passes ``middleware.py`` (keys, paths), ``requests.py`` (what a plan can follow, and what goes to
vLLM as it is), ``planning.py`` (a planner for each tenant, in a thread), then vLLM, then ``replies.py`` (our
statistics), and some of them ``shadowing.py`` (asked again for plain prefill, and compared). ``settings.py`` takes the
options from one process to the other. Nothing here imports vLLM.
"""
