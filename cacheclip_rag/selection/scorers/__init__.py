"""Scorers give every chunk token a score. To add a scorer: a file here and a line below."""

from .auxiliary_attention import AuxiliaryAttention as AuxiliaryAttention
from .base import CacheScorer as CacheScorer, PromptScorer as PromptScorer, Scorer as Scorer
from .chunk_start import ChunkStart as ChunkStart
from .oracle import Oracle as Oracle
from .query_attention import QueryAttention as QueryAttention
from .random import Random as Random
from .rank_mix import RankMix as RankMix
