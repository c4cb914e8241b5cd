"""Certificates: what ``cacheclip certify`` measured of a pair of models, and how engines obey it.

:mod:`.verdicts` reads the files, :mod:`.promise` watches what they promise, :mod:`.engine` is what an engine asks.
"""

from .promise import Guarantee, PromisedGate
from .verdicts import FORMAT_VERSION, THRESHOLDS, Verdicts, certificate_path, read_certificate

__all__ = [
    "FORMAT_VERSION",
    "THRESHOLDS",
    "Guarantee",
    "PromisedGate",
    "Verdicts",
    "certificate_path",
    "read_certificate",
]
