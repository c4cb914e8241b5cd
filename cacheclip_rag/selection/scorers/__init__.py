"""Scorers give every chunk token a score. To add a scorer: a file here and a line below."""

from .auxiliary_attention import AuxiliaryAttention
from .base import CacheScorer, PromptScorer, Scorer
from .chunk_start import ChunkStart
from .oracle import Oracle
from .query_attention import QueryAttention
from .random import Random
from .rank_mix import RankMix

__all__ = [
    "AuxiliaryAttention",
    "CacheScorer",
    "ChunkStart",
    "Oracle",
    "PromptScorer",
    "QueryAttention",
    "Random",
    "RankMix",
    "Scorer",
]
