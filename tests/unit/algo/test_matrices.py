"""Which tensors are the matrices inside a model's layers."""

import pytest

from farloop.algo.fragments import is_hidden_matrix


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.attention.query.weight",
        "blocks.0.attention.output.weight",  # of a block: not the model's output
        "blocks.3.head.weight",
        "model.layers.11.mlp.down_proj.weight",
        "transformer.h.2.attn.c_attn.weight",
        "encoder.layer.0.attention.output.dense.weight",
        "0.weight",
        "weight",
    ],
)
def test_a_matrix_of_a_layer_is_one(name: str) -> None:
    assert is_hidden_matrix(name, (16, 16))
    assert is_hidden_matrix(name, (16, 16, 3)), "and so is a convolution's"
    assert not is_hidden_matrix(name, (16,))
    assert not is_hidden_matrix(name, ())


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "bert.embeddings.word_embeddings.weight",
        "encoder.layers.0.relative_embedding.weight",
        "shared.weight",
        "head.weight",
        "lm_head.weight",
        "output.weight",
    ],
)
def test_an_embedding_or_a_head_is_none(name: str) -> None:
    assert not is_hidden_matrix(name, (256, 16))
