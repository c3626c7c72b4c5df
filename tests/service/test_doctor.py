"""Each fault that an operator meets, made for real, and named by `online-sao doctor`."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from online_sao.cli import main
from online_sao.config import Config
from online_sao.service import doctor
from online_sao.store import RolloutStore, models
from online_sao.store.database import make_engine, parse_url
from online_sao.types import Preference

NOBODY = 65534
FORK = multiprocessing.get_context("fork")


def load_standin():
    path = Path(__file__).parents[1] / "judge" / "standin.py"
    spec = importlib.util.spec_from_file_location("judge_standin", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.StandIn


def config(**sections):
    return Config.model_validate(sections)


def in_run_dir(folder, **sections):
    return config(service={"run_dir": str(folder)}, **sections)


class TestModel:
    def test_a_model_that_works(self, tiny_model):
        finding = doctor.check_model(config(model={"name": str(tiny_model)}))
        assert not finding.is_fault
        assert "tokens" in finding.what

    def test_no_model(self, tmp_path):
        finding = doctor.check_model(config(model={"name": str(tmp_path / "none")}))
        assert finding.is_fault
        assert "config.json" in finding.what

    def test_the_embedded_model_is_not_prepared(self):
        finding = doctor.check_model(Config())
        assert "not prepared" in finding.what
        assert "online-sao prepare" in finding.remedy

    def test_weights_or_tokenizer_are_missing(self, tiny_model, tmp_path):
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
        assert "tokenizer" in doctor.check_model(config(model={"name": str(folder)})).what
        (folder / "model.safetensors").unlink()
        assert "no weights" in doctor.check_model(config(model={"name": str(folder)})).what


class TestStore:
    def test_one_that_works_takes_a_write(self, tmp_path):
        settings = in_run_dir(tmp_path)
        assert not doctor.check_store(settings).is_fault  # not there yet, and not made either
        assert list(tmp_path.iterdir()) == []
        RolloutStore(settings.store_url).close()
        assert "takes writes" in doctor.check_store(settings).what
        with RolloutStore(settings.store_url) as store:
            assert len(store.events("doctor")) == 1

    def test_read_only(self):
        folder = Path(tempfile.mkdtemp())
        settings = in_run_dir(folder)
        RolloutStore(settings.store_url).close()
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        try:
            finding = as_nobody(doctor.check_store, settings)
        finally:
            folder.chmod(0o755)
            shutil.rmtree(folder)
        assert finding.is_fault
        assert "read-only" in finding.what or "cannot be opened" in finding.what
        assert "writable" in finding.remedy

    def test_an_old_schema(self, tmp_path):
        settings = in_run_dir(tmp_path)
        RolloutStore(settings.store_url).close()
        engine = make_engine(parse_url(settings.store_url))
        with engine.connect().execution_options(online_sao_write=True) as conn, conn.begin():
            is_schema = models.counters.c.name == "schema"
            conn.execute(models.counters.update().where(is_schema).values(value=1))
        engine.dispose()
        finding = doctor.check_store(settings)
        assert "has schema 1" in finding.what
        assert "online-sao migrate" in finding.remedy

    def test_not_a_database(self, tmp_path):
        (tmp_path / "store.sqlite").write_text("not a database, but long enough for one" * 40)
        assert "not an SQLite database" in doctor.check_store(in_run_dir(tmp_path)).what

    def test_a_server_that_is_down(self):
        url = "postgresql://nobody@127.0.0.1:1/none"
        assert "cannot be reached" in doctor.check_store(config(store={"url": url})).what


class TestDisk:
    def test_space(self, tmp_path):
        assert "GiB free" in doctor.check_disk(in_run_dir(tmp_path / "to" / "come")).what
        assert list(tmp_path.iterdir()) == []

    def test_full(self, small_disk):
        RolloutStore(in_run_dir(small_disk).store_url).close()
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", 0) as stream:
            while True:
                stream.write(b"x" * 4096)
        finding = doctor.check_disk(in_run_dir(small_disk))
        assert "No space left" in finding.what
        assert "Free some space" in finding.remedy
        finding = doctor.check_store(in_run_dir(small_disk))
        assert finding.is_fault
        assert "space" in finding.remedy

    def test_nearly_full(self, small_disk):
        finding = doctor.check_disk(in_run_dir(small_disk))
        assert "MiB free" in finding.what
        assert finding.is_fault


ONE_IN_BFLOAT16 = {"engine": {"dtype": "bfloat16"}, "learner": {"compute_dtype": "float32"}}


class TestDtype:
    def test_the_defaults_suit_this_machine(self):
        assert not doctor.check_dtype(Config()).is_fault

    def test_bfloat16_without_instructions_for_it(self, monkeypatch):
        monkeypatch.setattr(doctor, "native_dtype", lambda: "float32")
        finding = doctor.check_dtype(config(**ONE_IN_BFLOAT16))
        assert "Leave engine.dtype out" in finding.remedy
        assert not doctor.check_dtype(config(**ONE_IN_BFLOAT16, model={"device": "cuda"})).is_fault

    def test_bfloat16_with_them(self, monkeypatch):
        monkeypatch.setattr(doctor, "native_dtype", lambda: "bfloat16")
        finding = doctor.check_dtype(config(**ONE_IN_BFLOAT16))
        assert finding.what == "engine.dtype bfloat16, learner.compute_dtype float32"


class TestJudge:
    def test_the_embedded_one(self):
        assert "a verdict in" in doctor.check_judge(Config()).what

    def test_a_wrong_key(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
        with load_standin()("refuses_key") as server:
            settings = {"model": "openai/any", "api_base": server.url, "max_retries": 0}
            finding = doctor.check_judge(config(judge=settings))
        assert "no_key" in finding.what
        assert "key" in finding.remedy
        assert "sk-wrong" not in finding.what

    def test_nobody_there(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
        settings = {"model": "openai/any", "api_base": "http://127.0.0.1:1", "max_retries": 0}
        assert "connection" in doctor.check_judge(config(judge=settings)).what

    def test_the_preference_in_force_counts_and_not_the_settings(self, tmp_path):
        settings = in_run_dir(tmp_path)
        with RolloutStore(settings.store_url) as store:
            store.set_preference(Preference("concise", ("concise", "warm")), None)
        assert "concise" in doctor.check_judge(settings).what

    def test_a_style_that_it_does_not_know(self):
        finding = doctor.check_judge(config(preference={"style": "pirate", "pool": ["pirate"]}))
        assert "pirate" in finding.what


class TestEngine:
    def test_down(self):
        finding = doctor.check_engine(Config(), "http://127.0.0.1:1")
        assert "Nothing answers at http://127.0.0.1:1" in finding.what
        assert "online-sao serve" in finding.remedy

    @pytest.mark.parametrize(
        ("answers", "says"),
        [
            ({"/health": 500}, "not healthy"),
            ({"/v1/chat/completions": 401}, "refuses the key"),
            ({"/v1/chat/completions": 503}, "HTTP 503"),
            ({"/ready": 503}, "does not learn"),
        ],
    )
    def test_what_a_running_one_says(self, answers, says):
        with answering(answers) as url:
            finding = doctor.check_engine(Config(), url)
        assert says in finding.what
        assert finding.is_fault

    def test_well(self):
        with answering({}) as url:
            assert "weight version 7" in doctor.check_engine(Config(), url).what

    def test_learning_is_paused(self):
        with answering({"paused": "guard entropy: too certain."}) as url:
            finding = doctor.check_engine(Config(), url)
        assert "learning is paused: guard entropy" in finding.what
        assert "resume" in finding.remedy

    def test_the_address_of_one_that_is_bound_to_all(self):
        assert (
            doctor.address(config(service={"host": "0.0.0.0"}).service) == "http://127.0.0.1:8000"
        )
        assert doctor.address(config(service={"host": "::1"}).service) == "http://[::1]:8000"


def test_the_command(tmp_path, tiny_model, capsys):
    command = ["doctor", "--model", str(tiny_model), "--run-dir", str(tmp_path)]
    assert main([*command, "--url", "http://127.0.0.1:1"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed if line[0] != " "] == [
        *("model", "disk", "memory", "dtype", "store", "judge", "engine")
    ]
    assert [line.split()[0] for line in printed if line[0] != " "] == ["ok"] * 6 + ["FAULT"]


@contextlib.contextmanager
def answering(statuses):
    """A server that gives these statuses, and otherwise what a well endpoint gives."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status = statuses.get(self.path, 200)
            ready = {"ready": status == 200, "learner": "loading", "weight_version": 7}
            ready |= {"error": None, "paused": statuses.get("paused")}
            body = json.dumps(ready).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def as_nobody(work, *arguments):
    """What `work` returns in a process that may not write anywhere (root may)."""
    receiver, sender = FORK.Pipe(duplex=False)

    def run():
        if os.getuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        sender.send(work(*arguments))

    process = FORK.Process(target=run)
    process.start()
    sender.close()
    got = receiver.recv()
    process.join(30)
    return got
