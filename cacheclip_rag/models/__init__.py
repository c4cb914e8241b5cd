"""Models: finding and loading weights, and checking that their KV can be reused.

``packaged`` holds models whose weights come from the package index; ``load`` makes runtimes, once a process.
"""
