"""Start and stop an endpoint: the driver's side. The parts run in Ray; this watches them."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from online_sao.config import Config, EngineConfig, LearnerConfig, ServiceConfig
from online_sao.engine.weight_file import endpoint_folder
from online_sao.errors import ConfigError, OnlineSAOError, StoreError
from online_sao.judging import checked_judge
from online_sao.prepare import model_hash, resolve_model
from online_sao.service import cleanup, names
from online_sao.service.housekeeping import Housekeeper
from online_sao.service.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, Keys
from online_sao.service.memory_watch import MemoryWatch
from online_sao.store import RolloutStore
from online_sao.types import Preference

STOP_TIMEOUT_S = 90.0  # the running update and the last checkpoint
POLL_S = 0.5
NOTE_SEGMENTS_PERIOD_S = 4.0
SERVE_OVERHEAD_REQUESTS = 256  # control requests beside the generating ones

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Engine and learner share the cores, so a thread that waits must not spin for long; but to
    # sleep at once costs more: an update has thousands of parallel regions, and waking a
    # thread for each makes it 1.7 times as long. This is a tenth of a millisecond or two.
    "GOMP_SPINCOUNT": "20000",
    "KMP_BLOCKTIME": "0",
    # Ray keeps a record of every call between our parts: 23 MiB per 1000 rollouts.
    "RAY_task_events_report_interval_ms": "0",
    # Ray gives its workers the lowest priority; ours are the service itself.
    "RAY_worker_niceness": "0",
    "PYTHONWARNINGS": "ignore",
}

Report = Callable[[str], None]


class Endpoint:
    """A running endpoint. Use `running_endpoint`, which stops it whatever happens."""

    def __init__(self, config: Config, report: Report) -> None:
        self._config = config
        self._report = report
        self._lock: Any = None
        self._ray_started = False
        self._parts_started = False
        self._memory = MemoryWatch(self._tell_of_memory)
        self._weights_dir = endpoint_folder(config.run_dir)

    @property
    def url(self) -> str:
        return address(self._config.service)

    def start(self) -> None:
        """Check, prepare, start all parts; returns when the HTTP port answers.

        Raises OnlineSAOError with one sentence on what is wrong.
        """
        config = self._config
        check_settings(config)
        self._take_run_dir()
        left = cleanup.end_processes(config.run_dir)
        cleanup.remove_segments(config.run_dir)
        if left:
            self._report(f"ended {left} processes that an earlier crash left behind")
        check_port(config.service.host, config.service.port)
        self._report("preparing the model")
        model = resolve_model(config.model.name)
        digest = model_hash(model)
        self._migrate_store()
        with RolloutStore(config.store_url) as store:
            preference = store.preference()
            if preference is None:
                store.set_preference(
                    Preference(config.preference.style, tuple(config.preference.pool)), None
                )
            else:
                self._check_kept(preference)
        os.environ.update({k: os.environ.get(k, v) for k, v in ENVIRONMENT.items()})
        self._report("starting Ray")
        self._start_ray()
        self._start_parts(model, digest)

    def wait_ready(self, on_status: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Wait until value pretraining is done and the learner learns."""
        import httpx

        limit_s = self._config.service.start_timeout_s
        deadline = time.monotonic() + limit_s
        key = os.environ.get(ADMIN_KEY_VARIABLE) or os.environ.get(API_KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer = httpx.get(f"{self.url}/ready", headers=headers, timeout=10)
                status = answer.json()
                if answer.status_code == 200:
                    return
                if status.get("learner") == "failed":
                    raise OnlineSAOError(f"The learner failed: {status['error']}")
                if on_status is not None:
                    on_status(status)
            self._memory.look()
            time.sleep(POLL_S)
        raise OnlineSAOError(
            f"The endpoint was not ready within {limit_s:.0f} s (service.start_timeout_s)."
        )

    def watch(self) -> None:
        """Block until interrupted; raises OnlineSAOError if a part ends for good."""
        import ray

        housekeeper = Housekeeper(RolloutStore(self._config.store_url), self._config.service)
        segments_at = 0.0
        while True:
            time.sleep(2.0)
            housekeeper.run_due()
            self._memory.look()
            if time.monotonic() >= segments_at:  # a replica that was begun anew has new ones
                cleanup.note_segments(self._config.run_dir)
                segments_at = time.monotonic() + NOTE_SEGMENTS_PERIOD_S
            try:
                learner = ray.get_actor(names.LEARNER, namespace=names.NAMESPACE)
                status = ray.get(learner.status.remote(), timeout=30)
                board = ray.get_actor(names.BOARD, namespace=names.NAMESPACE)
                if ray.get(board.current_version.remote(), timeout=30) is None:
                    ray.get(learner.announce_again.remote(), timeout=30)
            except (ValueError, ray.exceptions.RayError):
                continue  # being restarted
            if status["state"] == "failed":
                raise OnlineSAOError(f"The learner failed: {status['error']}")

    def stop(self) -> None:
        """Stop all parts in order; leaves no process, no shared memory, and a checkpoint.

        Takes seconds; a second Ctrl-C does not cut it short, because that would leave behind
        what this is here to remove.
        """
        with _interrupts_ignored(self._report):
            self._stop()

    def _stop(self) -> None:
        if self._ray_started:
            self._report("stopping: finishing the update, writing a checkpoint")
            import ray

            if self._parts_started:  # else those of that name are another endpoint's
                self._stop_parts()
            with contextlib.suppress(Exception):
                ray.shutdown()
            self._ray_started = False
        if self._lock is not None:
            if not cleanup.wait_for_end(self._config.run_dir, cleanup.TERMINATE_WAIT_S):
                cleanup.end_processes(self._config.run_dir)
            cleanup.remove_segments(self._config.run_dir)
            shutil.rmtree(self._weights_dir, ignore_errors=True)
            self._lock.release()
            self._lock = None

    def _stop_parts(self) -> None:
        import ray
        from ray import serve

        with contextlib.suppress(Exception):
            learner = ray.get_actor(names.LEARNER, namespace=names.NAMESPACE)
            ray.get(learner.stop.remote(STOP_TIMEOUT_S), timeout=STOP_TIMEOUT_S + 10)
        with contextlib.suppress(Exception):
            cleanup.note_segments(self._config.run_dir)
        with contextlib.suppress(Exception):
            if self._is_on_cluster:  # where other applications may be served
                serve.delete(names.APP)
            else:
                serve.shutdown()
        with contextlib.suppress(Exception):  # detached: on a cluster it would stay
            ray.kill(ray.get_actor(names.BOARD, namespace=names.NAMESPACE))

    def _tell_of_memory(self, problem: str) -> None:
        self._report(problem)
        with contextlib.suppress(StoreError), RolloutStore(self._config.store_url) as store:
            store.add_event("error", {"what": problem})

    # --- parts

    @property
    def _is_on_cluster(self) -> bool:
        """Whether Ray is one that was there before us."""
        return bool(os.environ.get("RAY_ADDRESS"))

    def _refuse_second(self) -> None:
        """Our actors have fixed names, so that each finds the others."""
        import ray

        try:
            ray.get_actor(names.BOARD, namespace=names.NAMESPACE)
        except ValueError:
            return
        raise OnlineSAOError(
            "An endpoint runs on this Ray cluster already, or was killed there: stop it, restart "
            "the cluster, or give this one a cluster of its own (unset RAY_ADDRESS)."
        )

    def _take_run_dir(self) -> None:
        from filelock import FileLock, Timeout

        folder = self._config.run_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise OnlineSAOError(
                f"Another endpoint runs on {folder}; stop it, or give this one its own folder "
                "with --run-dir."
            ) from None
        except OSError as error:
            raise OnlineSAOError(
                f"The run folder {folder} cannot be written ({error.strerror}); choose another "
                "with --run-dir or ONLINE_SAO_HOME."
            ) from None
        self._lock = lock

    def _migrate_store(self) -> None:
        """Here and nowhere else by itself: no other process of this endpoint runs yet."""
        from online_sao.store.migration import migrate

        done = migrate(self._config.store_url)
        if done is not None:
            copy = f"; a copy from before is {done.backup}" if done.backup else ""
            self._report(f"store migrated from schema {done.before} to {done.after}{copy}")

    def _check_kept(self, preference: Preference) -> None:
        """The preference that an earlier start left: it counts, not the settings'."""
        config = self._config
        try:
            checked_judge(config, [(preference.style, preference.pool)])
        except ConfigError as error:
            raise ConfigError(
                f"{config.run_dir} keeps the preference '{preference.style}' of an earlier start, "
                f"which this judge does not know ({error}) Choose another --run-dir, or start with "
                "the judge of then and set another preference (PUT /v1/preference)."
            ) from None
        if (preference.style, tuple(preference.pool)) != (
            config.preference.style,
            tuple(config.preference.pool),
        ):
            self._report(
                f"preferred is '{preference.style}' among {', '.join(preference.pool)}, as it was "
                "set last; change it with PUT /v1/preference"
            )

    def _start_ray(self) -> None:
        import ray

        if self._is_on_cluster and self._config.store_url.startswith("sqlite"):
            raise ConfigError(
                "SQLite is for one host: on a Ray cluster set store.url to a PostgreSQL database."
            )
        variables = {name: os.environ[name] for name in ENVIRONMENT}
        variables[names.RUN_DIR_VARIABLE] = str(self._config.run_dir)
        options: dict[str, Any] = {
            "namespace": names.NAMESPACE,
            "log_to_driver": bool(os.environ.get("ONLINE_SAO_DEBUG")),
            "logging_level": logging.ERROR,
            "runtime_env": {"env_vars": variables},
        }
        if not self._is_on_cluster:
            # Logical CPUs: placement only. Real use of the cores is set by thread counts.
            options |= {
                # Not the one that some other program runs here, or left a note of when it died.
                "address": "local",
                "num_cpus": max(4, os.cpu_count() or 1, self._config.engine.num_replicas + 1),
                "include_dashboard": False,
                "object_store_memory": 256 * 2**20,
            }
        with _quiet(), _handlers_kept():
            ray.init(**options)
        self._ray_started = True

    def _start_parts(self, model: str, digest: str) -> None:
        import ray
        from ray import serve
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from online_sao.service.board import WeightBoard
        from online_sao.service.learner_actor import LearnerActor
        from online_sao.service.replica import Endpoint as EndpointDeployment
        from online_sao.service.reward_worker import RewardWorker

        config = self._config
        data = config.model_dump(mode="json")
        # A cluster's processes do not have our environment, so not our ONLINE_SAO_HOME.
        data["service"]["run_dir"] = str(config.run_dir)
        # Typed loosely: Ray's decorators turn these classes into others.
        board_class, learner_class, worker_class, endpoint_class = _untyped(
            WeightBoard, LearnerActor, RewardWorker, EndpointDeployment
        )
        # With the driver, without which there is no endpoint: not on a node that may go away.
        self._refuse_second()
        self._parts_started = True
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        board_class.options(
            name=names.BOARD, lifetime="detached", max_restarts=-1, scheduling_strategy=here
        ).remote()
        try:
            check_resources(config, ray.cluster_resources())
        except ConfigError as error:
            if not self._is_on_cluster:
                raise
            self._report(f"{error} Waiting for a node that has them.")  # it may be on its way
        self._report("starting learner and judge")
        # Handles are kept: an actor without one would be collected.
        self._parts = [
            learner_class.options(name=names.LEARNER, **placement(config, config.learner)).remote(
                data, model, digest, str(self._weights_dir)
            ),
            worker_class.options(name=names.REWARD_WORKER, scheduling_strategy=here).remote(data),
        ]
        self._report("starting the engine")
        deployment = endpoint_class.options(
            num_replicas=config.engine.num_replicas,
            max_ongoing_requests=config.service.max_ongoing_requests + SERVE_OVERHEAD_REQUESTS,
            health_check_period_s=5,
            health_check_timeout_s=30,
            graceful_shutdown_timeout_s=10,
            ray_actor_options={"num_cpus": 1, **placement(config, config.engine)},
        )
        with _quiet():
            serve.start(
                http_options={"host": config.service.host, "port": config.service.port},
                logging_config={"log_level": "ERROR", "enable_access_log": False},
            )
            try:
                serve.run(
                    deployment.bind(data, model, Keys.from_environment()),
                    name=names.APP,
                    route_prefix="/",
                    blocking=False,
                )
            except RuntimeError as error:
                raise OnlineSAOError(
                    f"The engine did not start: {_last_line(str(error))} "
                    "(set ONLINE_SAO_DEBUG=1 to see its output)."
                ) from None
        cleanup.note_segments(config.run_dir)


@contextlib.contextmanager
def running_endpoint(config: Config, report: Report = print) -> Iterator[Endpoint]:
    """A started endpoint; stopped at the end, and also when starting fails half-way."""
    endpoint = Endpoint(config, report)
    try:
        endpoint.start()
        yield endpoint
    finally:
        endpoint.stop()


def check_settings(config: Config) -> None:
    """What can be wrong before anything is started. Raises OnlineSAOError."""
    from online_sao.config import OFFLINE_ONLY_ADVANTAGES

    if config.learner.advantage in OFFLINE_ONLY_ADVANTAGES:
        raise ConfigError(
            f"The preset '{config.learner.preset}' compares several answers to one prompt, and "
            "a live request is answered once; run it with `online-sao train`."
        )
    host, has_key = config.service.host, bool(os.environ.get(API_KEY_VARIABLE))
    if not (_is_loopback(host) or has_key or config.service.insecure):
        raise ConfigError(
            f"Binding to {host} opens the endpoint to others: set {API_KEY_VARIABLE}, or pass "
            "--insecure if that is meant."
        )
    checked_judge(config, [(config.preference.style, config.preference.pool)])
    if config.service.topics is not None:
        from online_sao.writing import load_topics

        topics = load_topics(config.service.topics)
        unknown = [style for style in config.preference.pool if style not in topics.styles]
        if unknown:
            raise ConfigError(
                f"The topic set {topics.name} cannot ask for {', '.join(unknown)}: set "
                "service.topics=none, and the critic is fitted to the first live rollouts, or name "
                "a topics file that has these styles."
            )


def address(service: ServiceConfig) -> str:
    """Where this machine reaches the endpoint."""
    host = service.host
    if host in ("0.0.0.0", "::"):  # bound to all: this machine is one of them
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{service.port}"


def placement(config: Config, part: LearnerConfig | EngineConfig) -> dict[str, Any]:
    """Ray's options that place the learner or a replica: a node with these resources.

    A share of a GPU is asked for where there are GPUs, because Ray hides them from an actor
    that asks for none.
    """
    options: dict[str, Any] = {"resources": dict(part.resources)} if part.resources else {}
    if uses_gpu(config):
        options["num_gpus"] = part.gpu_share
    return options


def check_resources(config: Config, there: Mapping[str, float]) -> None:
    """Raise ConfigError when Ray could never place the parts: it would wait for ever."""
    wanted: dict[str, float] = {}
    parts = ((config.learner, 1), (config.engine, config.engine.num_replicas))
    for part, count in parts:
        options = placement(config, part)
        needs = {"CPU": 1.0, "GPU": options.get("num_gpus", 0.0), **options.get("resources", {})}
        for name, amount in needs.items():
            wanted[name] = wanted.get(name, 0.0) + count * amount
    short = [
        f"{amount:g} {name} of {there.get(name, 0.0):g}"
        for name, amount in wanted.items()
        if amount > there.get(name, 0.0) + 1e-9
    ]
    if short:
        raise ConfigError(
            f"Learner and {config.engine.num_replicas} replica(s) need {', '.join(short)} that "
            "Ray has: lower engine.num_replicas, or mend learner.resources, engine.resources "
            "and the gpu_share of both."
        )


def uses_gpu(config: Config) -> bool:
    """Whether learner and engine are to run on GPUs; `auto` asks the running Ray."""
    if config.model.device != "auto":
        return config.model.device == "cuda"
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def check_port(host: str, port: int) -> None:
    """Raise OnlineSAOError when something listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OnlineSAOError(
                f"The address {host}:{port} cannot be used ({error.strerror}); "
                "choose another with --port."
            ) from None


def _untyped(*objects: Any) -> tuple[Any, ...]:
    return objects


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given."


@contextlib.contextmanager
def _interrupts_ignored(report: Report) -> Iterator[None]:
    """Ctrl-C and SIGTERM only print a line meanwhile (in the main thread; elsewhere as is)."""
    try:
        before = {
            number: signal.signal(number, lambda *_: report("still stopping, a few seconds more"))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray puts handlers of its own on SIGTERM (in the main thread; elsewhere it cannot): one raises
    SystemExit, and one in C aborts the process three seconds later, in the middle of `stop`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray's start-up chatter from the terminal, unless debugging."""
    if os.environ.get("ONLINE_SAO_DEBUG"):
        yield
        return
    sys.stdout.flush()
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        yield
