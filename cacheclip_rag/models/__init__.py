"""Models: finding, fetching and loading weights.

``packaged`` fetches models from the package index; ``load`` makes runtimes, one per model and process.
"""
