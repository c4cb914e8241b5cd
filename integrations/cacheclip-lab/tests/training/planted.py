"""An auxiliary model one of whose heads is known to find something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cacheclip_lab.training.families import synthetic_samples
from cacheclip_testing import build_model, make_tokenizer, tiny_spec as of
from transformers import AutoModelForCausalLM

PLANTED = (1, 2)
"""Layer and head."""


def build_planted(folder: Path) -> str:
    """An auxiliary model one of whose heads attends to tokens that are the same as the asking one.

    What enters its layers is the embeddings alone (the lower layer writes nothing), and in this head query and key are
    the same random projection, in dimensions that hardly turn. Its tokens are mostly words.
    """
    layer, head = PLANTED
    vocab_size, dim, hidden = 3000, 32, 64
    spec = of("llama", num_hidden_layers=2, head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": 1e9})
    build_model(folder, spec, vocab_size=vocab_size)
    texts = [text for each in synthetic_samples(60) for text in (*each.chunks, each.question)]
    make_tokenizer(vocab_size, texts).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for below in model.model.layers[:layer]:
            below.self_attn.o_proj.weight.zero_()
            below.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.normal_(generator=generator)
        slow = torch.zeros(dim, 1)
        slow[dim // 4 : dim // 2] = slow[3 * dim // 4 :] = 1.0
        projection = slow * torch.randn(dim, hidden, generator=generator) / 4
        attention = model.model.layers[layer].self_attn
        attention.q_proj.weight[head * dim : (head + 1) * dim] = projection
        attention.k_proj.weight[head // 2 * dim : (head // 2 + 1) * dim] = projection  # two heads share a key head
    model.save_pretrained(folder)
    return str(folder)
