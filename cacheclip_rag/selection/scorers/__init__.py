"""Scorers give every chunk token a score. To add a scorer: a file here and a line below."""

from .auxiliary_attention import AuxiliaryAttention as AuxiliaryAttention
from .base import CacheScorer as CacheScorer, PromptScorer as PromptScorer, Scorer as Scorer, pick_layers as pick_layers
from .chunk_start import ChunkStart as ChunkStart
from .query_attention import QueryAttention as QueryAttention, attention_to_tokens as attention_to_tokens
from .rank_mix import RankMix as RankMix
