"""Several Ray nodes on this machine, PostgreSQL, one node removed in the middle.

The nodes share this machine's memory; what makes them several is that Ray places the learner
and the two engine replicas on nodes of their own, so that weights travel through Ray's object
store, and that one of them goes away.
"""

import time

import httpx
import pytest
import ray
from postgres import own_schema
from ray import serve
from ray.cluster_utils import Cluster
from served import TINY_SETTINGS, ServedEndpoint

from online_sao.service import names
from online_sao.store import RolloutStore
from online_sao.types import RolloutState

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,  # four Ray nodes and two engines
    pytest.mark.timeout(900),
]

WAIT_S = 240
SETTINGS = (
    *TINY_SETTINGS,
    "engine.num_replicas=2",
    "engine.kv_cache_gib=0.25",
    "engine.resources={engine = 1}",
    "learner.resources={learner = 1}",
    "guards.probe_every=0",
)


@pytest.fixture
def cluster():
    options = {"object_store_memory": 128 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **options})
    nodes = {
        "learner": made.add_node(num_cpus=2, resources={"learner": 1}, **nodeless(options)),
        "first": made.add_node(num_cpus=2, resources={"engine": 1}, **nodeless(options)),
        "second": made.add_node(num_cpus=2, resources={"engine": 1}, **nodeless(options)),
    }
    made.wait_for_nodes()
    try:
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()


def nodeless(options):
    return {"object_store_memory": options["object_store_memory"]}


def until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            found = condition()
        except httpx.HTTPError:
            found = None
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.5)


def test_a_node_is_lost_and_nothing_else(cluster, postgres_server, tiny_model, tmp_path):
    ray_cluster, nodes = cluster
    with own_schema(postgres_server) as store_url:
        settings = [*SETTINGS, f"store.url={store_url}"]
        env = {"RAY_ADDRESS": ray_cluster.address}
        served = ServedEndpoint(tiny_model, tmp_path / "e", *settings, env=env)
        try:
            served.start()
            ids = [served.chat().json()["id"] for _ in range(8)]
            assert {served.settled(id)["state"] for id in ids} == {"trained"}
            version = served.get("/v1/learning").json()["weight_version"]
            until(lambda: serving(served) == {version}, "the new weights on both replicas")

            ray_cluster.remove_node(nodes["second"])
            answers = [until(lambda: answered(served), "an answer") for _ in range(8)]
            rollouts = [served.settled(answer.json()["id"], 120) for answer in answers]
            assert {rollout["state"] for rollout in rollouts} == {"trained"}

            # Another node takes its place; its replica starts from the current weights.
            ray_cluster.add_node(
                num_cpus=2, resources={"engine": 1}, object_store_memory=128 * 2**20
            )
            newest = served.get("/v1/learning").json()["weight_version"]
            until(lambda: num_running(ray_cluster.address) == 2, "a second replica")
            until(lambda: serving(served) == {newest}, "the current weights on both")
            assert served.stop() == 130
        finally:
            if served.process is not None:
                served.stop()
        with RolloutStore(store_url) as store:
            counts = store.counts()
            assert counts[RolloutState.TRAINED] >= 16
            assert counts[RolloutState.CLAIMED] == 0


def answered(served):
    answer = served.chat()
    return answer if answer.status_code == 200 else None


def serving(served):
    """Versions that the replicas serve, asked often enough to meet both."""
    return {served.get("/ready").json().get("weight_version") for _ in range(20)}


def num_running(address):
    """Replicas that Ray Serve counts as running."""
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    deployment = serve.status().applications[names.APP].deployments[names.DEPLOYMENT]
    return deployment.replica_states.get("RUNNING", 0)
