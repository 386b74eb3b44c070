import pytest

from nearflash.planning.profile import load_machine
from nearflash.planning.shapes import from_config


@pytest.fixture
def t4():
    return load_machine("t4")


def _opt(layers, hidden, heads):
    return from_config(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ffn_dim": 4 * hidden,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": hidden,
            "activation_function": "relu",
        }
    )


@pytest.fixture
def opt():
    """OPT of so many layers, hidden dims and heads."""
    return _opt


@pytest.fixture
def opt_175b():
    return _opt(96, 12288, 96)


@pytest.fixture
def opt_6_7b():
    return _opt(32, 4096, 32)


@pytest.fixture
def llama_70b():
    return from_config(
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        }
    )


@pytest.fixture
def mixtral():
    return from_config(
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        }
    )
