"""What tests of every part share: a tiny model, and a home of their own.

No test reads or writes the user's runs, and none reaches a hub or a paid service. A test
marked `model` finds the prepared embedded model in its home: that folder alone is shared
with the user's cache, because making it takes minutes.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `postgres`, shared by several folders

from online_sao.config import EMBEDDED_MODEL, home

os.environ.setdefault("HF_HUB_OFFLINE", "1")

USER_HOME = home()  # read before any fixture changes the environment
KEY_ENDINGS = ("_API_KEY", "_ADMIN_KEY")

TINY_VOCABULARY = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def _no_keys_and_a_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also for fixtures of a wider scope, which are set up before `isolated_home`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.endswith(KEY_ENDINGS)]:
            patch.delenv(name)
        patch.setenv("ONLINE_SAO_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def isolated_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """ONLINE_SAO_HOME of this test alone; with the embedded model if it is marked `model`."""
    folder = tmp_path_factory.mktemp("home")
    if request.node.get_closest_marker("model"):
        models = request.getfixturevalue("model_home") / "models"
        (folder / "models").symlink_to(models.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONLINE_SAO_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def model_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the prepared embedded model, for fixtures that outlive one test.

    Its `models` is the user's own, and is filled on the first use.
    """
    from online_sao.prepare import prepare_embedded

    folder = tmp_path_factory.mktemp("model_home")
    (USER_HOME / "models").mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to((USER_HOME / "models").resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONLINE_SAO_HOME", str(folder))
        prepare_embedded(EMBEDDED_MODEL)
    return folder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server that these tests started."""
    import postgres

    with postgres.server() as url:
        yield url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights (0.2 M parameters, bfloat16) with a ChatML tokenizer.

    In Hugging Face form, for transformers and vLLM alike. The same numbers each time.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    tokenizer = _tiny_tokenizer()
    assert len(tokenizer) == TINY_VOCABULARY
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention takes
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,  # some tokens are ten times as likely as others
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from online_sao.writing import load_topics, warm_start_examples

    topics = load_topics()
    text = [message["content"] for e in warm_start_examples(40, seed=0) for message in e.messages]
    text += [e.answer for e in warm_start_examples(40, seed=0)] + list(topics.training)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
