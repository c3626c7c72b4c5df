"""What tests of every part share: a tiny model, and a home of their own.

No test reads or writes the user's runs, and none reaches a hub or a paid service. Only the
embedded model is kept in the user's cache, because making it takes a while (`base_model`).
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for modules shared by several folders

from online_sao.config import home
from online_sao.prepare import EMBEDDED_BASE

os.environ.setdefault("HF_HUB_OFFLINE", "1")

USER_HOME = home()  # read before any fixture changes the environment
KEY_ENDINGS = ("_API_KEY", "_ADMIN_KEY")


@pytest.fixture(scope="session", autouse=True)
def _no_keys_and_a_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also for fixtures of a wider scope, which are set up before `isolated_home`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.endswith(KEY_ENDINGS)]:
            patch.delenv(name)
        patch.setenv("ONLINE_SAO_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _contexts_wait_for_no_socket() -> Iterator[None]:
    """An engine that a test is done with leaves zmq contexts and their sockets to the garbage
    collector. A context's finalizer waits until its sockets are closed; where theirs come after
    it, that is for ever, in whatever thread the collector runs. Without it the sockets are closed
    by their finalizers, and the context goes after all of them.
    """
    import zmq

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Context, "__del__", lambda self: None)
        yield


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """ONLINE_SAO_HOME of this test alone."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONLINE_SAO_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The embedded model before its warm start; kept in the user's cache."""
    from online_sao.prepare import prepare_embedded

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONLINE_SAO_HOME", str(USER_HOME))
        return prepare_embedded(EMBEDDED_BASE)


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
    from tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")
