"""Models: finding, fetching and loading weights.

``packaged.catalogue`` and ``packaged.pull`` do not import torch.
"""
