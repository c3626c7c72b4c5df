"""Weights from the learner's node to an engine's on another, through Ray's object store.

Two Ray nodes on this machine, without an engine; with engines: test_cluster.py.
"""

import time
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from online_sao.service import names
from online_sao.service.board import WeightBoard, file_here
from online_sao.service.learner_actor import BoardPublisher

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
WAIT_S = 60


@ray.remote(num_cpus=0, resources={"engine": 1})
class Reader:
    """What a replica does with an announcement."""

    async def read(self, have: int):
        board = ray.get_actor(names.BOARD, namespace=names.NAMESPACE)
        announced = await board.fetch.remote("reader", have, WAIT_S)
        file = await file_here(announced)
        file.verify()
        await board.report.remote("reader", announced.version)
        return announced.version, file.path, ray.get_runtime_context().get_node_id()


@pytest.fixture
def two_nodes():
    store = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **store})
    cluster.add_node(num_cpus=1, resources={"engine": 1}, **store)
    ray.init(address=cluster.address, namespace=names.NAMESPACE, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_each_version_is_copied_and_checked(two_nodes, tmp_path):
    board = WeightBoard.options(name=names.BOARD, max_restarts=1, max_task_retries=-1).remote()
    publisher = BoardPublisher(tmp_path, deadline_s=WAIT_S)
    reader = Reader.remote()
    paths = set()
    for version in (1, 2, 3):
        publisher.publish(version, {name: t + version for name, t in TENSORS.items()})
        got, path, node = ray.get(reader.read.remote(version - 1), timeout=WAIT_S)
        assert got == version
        assert node != ray.get_runtime_context().get_node_id()
        assert Path(path).parent != tmp_path  # its own file, not the learner's
        paths.add(path)
    assert len(paths) == 2  # copies take turns
    # A board that was restarted knows nothing until it is told again.
    ray.kill(board, no_restart=False)
    deadline = time.monotonic() + WAIT_S
    while ray.get(board.current_version.remote(), timeout=WAIT_S) is not None:
        assert time.monotonic() < deadline, "the board was not restarted"
        time.sleep(0.1)
    publisher.announce_again()
    assert ray.get(reader.read.remote(0), timeout=WAIT_S)[0] == 3
