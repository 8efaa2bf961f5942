"""The shell scripts set up once and hand their arguments to the right command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).parents[3]
# Commands that print what they were called with, in place of the real ones.
STUB = '#!/bin/bash\necho "$(basename "$0") $*"\n'
# On several nodes.
TORCHRUN = "python -m vlm_pg.distributed.torchrun"
ZERO_2 = "training.engine=deepspeed training.deepspeed_config=configs/deepspeed/zero2.json"
# Of the nodes, what the scripts hand on by the environment.
RANK_STUB = (
    '#!/bin/bash\necho "$(basename "$0") $* rank=$RANK/$WORLD_SIZE local=$LOCAL_RANK at=$MASTER_ADDR:$MASTER_PORT"\n'
)
PYTHON_STUB = '#!/bin/bash\n[ "$1" != -m ] || exec echo "python $*"\ncat >/dev/null\necho "${FAKE_ENGINE:-torch}"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a complete .venv of stubs."""
    root = tmp_path / "check out"
    (root / ".venv/bin").mkdir(parents=True)
    shutil.copytree(REPO_ROOT / "scripts", root / "scripts")
    (root / "configs").mkdir()
    (root / "configs/mine.yaml").write_text("")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPO_ROOT / name, root)
    for name in ("vlm-pg", "deepspeed", "torchrun", "python"):
        put_stub(root, name, PYTHON_STUB if name == "python" else STUB)
    run(root, "-c", '. scripts/setup.sh; _fingerprint >"$STAMP"')
    return root


def put_stub(root: Path, name: str, text: str) -> None:
    (root / ".venv/bin" / name).write_text(text)
    (root / ".venv/bin" / name).chmod(0o755)


def start(root: Path, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Without variables of launchers around the tests."""
    launchers = ("CUDA_VISIBLE_DEVICES", "MASTER_", "NODE_RANK", "NNODES", "NPROC", "PET_", "RANK", "LOCAL_RANK")
    others = (*launchers, "SLURM_", "WORLD_SIZE", "VLM_PG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return subprocess.run(
        ["bash", *arguments], cwd=cwd or root, env=kept | environment, capture_output=True, text=True, check=False
    )


def run(root: Path, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    done = start(root, *arguments, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(root: Path, *arguments: str, gpus: str = "", **environment: str) -> list[str]:
    return run(root, "scripts/train_video.sh", *arguments, CUDA_VISIBLE_DEVICES=gpus, **environment).splitlines()


@pytest.mark.parametrize("overrides, gpus", [([], ""), (["training.steps=5", "run.seed=1"], "0,1")])
def test_without_a_config_the_embedded_default_is_prepared_and_trained(
    checkout: Path, overrides: list[str], gpus: str
) -> None:
    assert train(checkout, *overrides, gpus=gpus) == [
        "vlm-pg prepare embedded --out data/embedded",
        " ".join(["vlm-pg train configs/embedded.yaml", *overrides]),
    ]


@pytest.mark.parametrize("name", ["embedded.yaml", "algorithms/cppo.yaml"])
def test_a_config_of_the_embedded_task_has_its_data_prepared_first(checkout: Path, name: str) -> None:
    path = checkout / "configs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert train(checkout, f"configs/{name}", "training.steps=5") == [
        "vlm-pg prepare embedded --out data/embedded",
        f"vlm-pg train {path} training.steps=5",
    ]


@pytest.mark.parametrize("gpus", ["", "0", "-1,0"])
def test_a_config_on_at_most_one_gpu_is_trained_in_this_process(checkout: Path, gpus: str) -> None:
    path = checkout / "configs/mine.yaml"
    assert train(checkout, "configs/mine.yaml", "training.steps=5", gpus=gpus) == [
        f"vlm-pg train {path} training.steps=5"
    ]


def test_a_config_on_several_gpus_starts_its_engine_or_zero_2(checkout: Path) -> None:
    path = checkout / "configs/mine.yaml"
    assert train(checkout, "configs/mine.yaml", "a.b=5", gpus="2,3", FAKE_ENGINE="deepspeed") == [
        "Starting DeepSpeed on 2 GPUs",
        f"deepspeed --no_local_rank --module vlm_pg.cli train {path} a.b=5",
    ]
    assert train(checkout, "configs/mine.yaml", gpus="0,1,2") == [
        f"Several processes: adding {ZERO_2}",
        "Starting DeepSpeed on 3 GPUs",
        f"deepspeed --no_local_rank --module vlm_pg.cli train {path} {ZERO_2}",
    ]
    assert (REPO_ROOT / "configs/deepspeed/zero2.json").is_file()
    assert train(checkout, "configs/mine.yaml", "training.engine=torch", gpus="0,1") == [
        "Starting torchrun: 2 processes",
        f"torchrun --standalone --nproc-per-node=2 --module vlm_pg.cli train {path} training.engine=torch",
    ]


def test_several_configs_run_one_after_the_other_from_the_last_checkpoint(checkout: Path) -> None:
    """The stub of python names the checkpoint as it does the engine."""
    first, second = checkout / "configs/mine.yaml", checkout / "configs/next.yaml"
    second.write_text("")
    assert train(checkout, "configs/mine.yaml", "configs/next.yaml", "a.b=5") == [
        f"vlm-pg train {first} a.b=5",
        f"vlm-pg train {second} a.b=5 model.path=torch",
    ]
    for override, words in (("run.dir=x", "Each run needs a folder of its own"), ("run.name=x", "Set them in the con")):
        done = start(checkout, "scripts/train_video.sh", "configs/mine.yaml", "configs/next.yaml", override)
        assert done.returncode == 2 and words in done.stderr and not done.stdout
    rank = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    done = start(checkout, "scripts/train_video.sh", "configs/mine.yaml", "configs/next.yaml", **rank)
    assert done.returncode == 2 and "2 configs are given to a rank" in done.stderr


def test_as_many_processes_as_requested(checkout: Path) -> None:
    lines = train(checkout, "configs/mine.yaml", FAKE_ENGINE="deepspeed", NPROC_PER_NODE="4")
    assert lines[-1].startswith("torchrun --standalone --nproc-per-node=4 ")
    assert train(checkout, NPROC_PER_NODE="2")[-1].startswith("torchrun --standalone --nproc-per-node=2 ")


def test_inside_a_launcher_no_second_one_is_started(checkout: Path) -> None:
    ours = {"WORLD_SIZE": "16", "RANK": "3", "LOCAL_RANK": "1"}
    assert train(checkout, "configs/mine.yaml", gpus="0,1", **ours)[0].startswith("vlm-pg train ")
    assert train(checkout, "configs/embedded.yaml", gpus="0,1", **ours)[0].startswith("vlm-pg train ")


def test_servers_of_the_config_are_started_once_around_the_script(checkout: Path) -> None:
    path, script = checkout / "configs/mine.yaml", checkout / "scripts/train_video.sh"
    serves = {"FAKE_ENGINE": "torch 127.0.0.1"}
    around = f"vlm-pg serve {path} a.b=5 -- bash {script} {path} a.b=5"
    assert train(checkout, "configs/mine.yaml", "a.b=5", gpus="0,1", **serves) == [around]
    inside = {"VLM_PG_SERVING": "1", **serves}
    assert train(checkout, "configs/mine.yaml", gpus="0", **inside) == [f"vlm-pg train {path}"]
    assert train(checkout, "configs/mine.yaml", gpus="0,1", **inside)[0] == f"Several processes: adding {ZERO_2}"
    # Ranks of the user's own launcher, and other nodes than the first.
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    assert train(checkout, "configs/mine.yaml", **ranks, **serves) == [f"vlm-pg train {path}"]
    reached = {"NNODES": "2", "MASTER_ADDR": "node-0", "FAKE_ENGINE": "deepspeed node-0"}
    assert train(checkout, "configs/mine.yaml", "a.b=5", NODE_RANK="0", **reached) == [around]
    assert train(checkout, "configs/mine.yaml", NODE_RANK="1", **reached)[0].startswith("Starting torchrun: node 1")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "launch.host is 127.0.0.1, which the other of 2 nodes"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "Use scripts/nodes/train_vllm.sbatch"),
    ],
)
def test_servers_that_other_nodes_do_not_reach_are_refused(nodes: dict[str, str], words: str, checkout: Path) -> None:
    serves = {"CUDA_VISIBLE_DEVICES": "", "FAKE_ENGINE": "torch 127.0.0.1"}
    done = start(checkout, "scripts/train_video.sh", "configs/mine.yaml", **serves, **nodes)
    assert done.returncode == 2 and words in done.stderr


def test_one_node_of_an_allocation_serves(checkout: Path) -> None:
    put_stub(checkout, "srun", '#!/bin/bash\necho "srun $*"\n[ "$1" = --overlap ] && exec sleep 60\nsleep 1\n')
    put_stub(checkout, "scontrol", "#!/bin/bash\nprintf 'node-1\\nnode-2\\nnode-3\\n'\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-3]", "SLURM_JOB_NUM_NODES": "3"}
    job |= {"SLURM_GPUS_ON_NODE": "8", "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}"}
    lines = run(checkout, "scripts/nodes/train_vllm.sbatch", "configs/mine.yaml", "a.b=5", **job).splitlines()
    at = (
        "rollout.server.url=http://node-3:8000/v1 rollout.server.launch.host=node-3 rollout.server.launch.num_servers=8"
    )
    assert sorted(lines) == [
        f"srun --nodes=2 --ntasks-per-node=8 --exclude=node-3 --kill-on-bad-exit=1 bash scripts/train_video.sh "
        f"configs/mine.yaml {at} a.b=5 rollout.server.wait_seconds=1800 run.resume=auto",
        f"srun --overlap --nodes=1 --ntasks=1 --nodelist=node-3 .venv/bin/vlm-pg serve configs/mine.yaml {at} a.b=5",
    ]


NODES = {
    "NNODES": {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"},
    "operator": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node-0", "PET_NPROC_PER_NODE": "auto"},
    "pods": {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node-0"},
}


@pytest.mark.parametrize("how", NODES)
def test_described_nodes_start_torchrun(how: str, checkout: Path) -> None:
    assert train(checkout, "configs/mine.yaml", gpus="0,1,2,3", FAKE_ENGINE="deepspeed", **NODES[how]) == [
        "Starting torchrun: node 1 of 2, 4 processes on each, the first is node-0",
        f"{TORCHRUN} --nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr=node-0 --master-port=29500 "
        f"--module vlm_pg.cli train {checkout / 'configs/mine.yaml'}",
    ]


def test_the_file_for_torchrun(checkout: Path) -> None:
    lines = run(checkout, "scripts/nodes/torchrun.sh", "node-0", "2", "0", "configs/mine.yaml", "a.b=5").splitlines()
    assert lines[0] == f"Several processes: adding {ZERO_2}"
    assert lines[-1] == (
        f"{TORCHRUN} --nnodes=2 --node-rank=0 --nproc-per-node=1 --master-addr=node-0 --master-port=29500 "
        f"--module vlm_pg.cli train {checkout / 'configs/mine.yaml'} a.b=5 {ZERO_2}"
    )
    assert "FIRST_NODE NODES NODE_RANK CONFIG" in run(checkout, "scripts/nodes/torchrun.sh", "--help")
    assert start(checkout, "scripts/nodes/torchrun.sh", "node-0").returncode == 2


def test_only_the_first_node_renders_the_embedded_task(checkout: Path) -> None:
    (checkout / "configs/embedded.yaml").write_text("")
    for node, rendered in (("0", True), ("1", False)):
        lines = train(checkout, "configs/embedded.yaml", NNODES="2", NODE_RANK=node, MASTER_ADDR="node-0")
        assert ("vlm-pg prepare embedded --out data/embedded" in lines) == rendered
        # No node trains alone.
        lines = train(checkout, NNODES="2", NODE_RANK=node, MASTER_ADDR="node-0")
        assert lines[-1].startswith(f"{TORCHRUN} --nnodes=2 ") and "configs/embedded.yaml" in lines[-1]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "a"}, '2 nodes were asked for, but NODE_RANK is ""'),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            "NODE_RANK is 2, and there are 2 nodes. Allowed is 0 to 1",
        ),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set. Set it to the name or address of the first node"),
        ({"PET_NNODES": "1:4", "NODE_RANK": "0"}, 'the number of nodes is "1:4". It must be one number'),
        ({"WORLD_SIZE": "2"}, '2 nodes were asked for, but RANK is ""'),
        ({"NPROC_PER_NODE": "two"}, 'NPROC_PER_NODE is "two". Set it to the number of processes on each node'),
        ({"VLM_PG_HOSTFILE": "/no/such"}, "VLM_PG_HOSTFILE is /no/such, which is no file"),
        ({"VLM_PG_HOSTFILE": "configs/mine.yaml"}, "mine.yaml names no host. It must have a line"),
        ({"VLM_PG_HOSTFILE": "scripts/nodes/hostfile", "PATH": "/usr/bin:/bin"}, "2 nodes, and pdsh, by which"),
    ],
)
def test_impossible_starts_are_refused(environment: dict[str, str], words: str, checkout: Path) -> None:
    done = start(checkout, "scripts/train_video.sh", "configs/mine.yaml", CUDA_VISIBLE_DEVICES="", **environment)
    assert done.returncode == 2 and words in done.stderr


def test_a_hostfile_starts_deepspeed_on_its_nodes(checkout: Path) -> None:
    config, hosts = checkout / "configs/mine.yaml", checkout / "scripts/nodes/hostfile"
    put_stub(checkout, "pdsh", "")
    named = {"VLM_PG_HOSTFILE": "scripts/nodes/hostfile", "FAKE_ENGINE": "deepspeed"}
    assert train(checkout, "configs/mine.yaml", **named) == [
        f"Starting DeepSpeed on 2 nodes ({hosts})",
        f"deepspeed --hostfile {hosts} --no_local_rank --force_multi --module vlm_pg.cli train {config}",
    ]
    assert train(checkout, "configs/mine.yaml", NODE_RANK="1", **named) == [
        f"Starting DeepSpeed: node 1 of 2 ({hosts})",
        f"deepspeed --hostfile {hosts} --no_local_rank --no_ssh --node_rank 1 --master_addr node-0 --master_port 29500 "
        f"--module vlm_pg.cli train {config}",
    ]
    hosts.write_text("here slots=2\n")
    assert "--no_ssh --node_rank 0 --master_addr 127.0.0.1" in train(checkout, "configs/mine.yaml", **named)[-1]


def test_ssh_checks_that_nodes_are_alive_with_the_users_options(checkout: Path) -> None:
    for name, text in (("pdsh", ""), ("deepspeed", '#!/bin/bash\necho "ssh $PDSH_SSH_ARGS_APPEND"\n')):
        put_stub(checkout, name, text)
    named = {"VLM_PG_HOSTFILE": "scripts/nodes/hostfile", "FAKE_ENGINE": "deepspeed"}
    asks = "-o ServerAliveInterval=10 -o ServerAliveCountMax=6"
    assert train(checkout, "configs/mine.yaml", **named)[-1].split() == ["ssh", *asks.split()]
    mine = "-o ServerAliveInterval=5"  # ssh takes the first of two
    assert train(checkout, "configs/mine.yaml", PDSH_SSH_ARGS_APPEND=mine, **named)[-1] == f"ssh {mine} {asks}"


def test_an_allocation_of_several_nodes_starts_a_task_for_each_gpu(checkout: Path) -> None:
    put_stub(checkout, "srun", STUB)
    job = {
        "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NUM_NODES": "2",
        "FAKE_ENGINE": "deepspeed",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert run(checkout, "scripts/nodes/train.sbatch", "configs/mine.yaml", "a.b=5", **job).splitlines() == [
        "Starting srun: 2 nodes, 2 tasks on each",
        f"srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit=1 bash {checkout}/scripts/train_video.sh "
        f"{checkout / 'configs/mine.yaml'} a.b=5 run.resume=auto",
    ]


@pytest.mark.parametrize(("gpus", "local"), [("0,1", "1"), ("0", "0")], ids=["all GPUs seen", "one GPU a task"])
def test_a_task_of_slurm_is_a_rank(gpus: str, local: str, checkout: Path) -> None:
    for name, text in (("vlm-pg", RANK_STUB), ("scontrol", "#!/bin/bash\necho node-7\nsleep 0.2\nseq 100000\n")):
        put_stub(checkout, name, text)
    task = {
        "SLURM_JOB_ID": "70123",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "node-[7-8]",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}",
    }
    assert train(checkout, "configs/mine.yaml", gpus=gpus, **task) == [
        f"vlm-pg train {checkout / 'configs/mine.yaml'} {ZERO_2} rank=3/4 local={local} at=node-7:20123"
    ]


def test_paths_are_relative_to_where_the_user_stands(checkout: Path) -> None:
    elsewhere = checkout.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "my config.yaml").write_text("")
    script = str(checkout / "scripts/train_video.sh")
    out = run(checkout, script, "my config.yaml", cwd=elsewhere, CUDA_VISIBLE_DEVICES="")
    assert out == f"vlm-pg train {elsewhere / 'my config.yaml'}\n"
    script = str(checkout / "scripts/eval_video.sh")
    out = run(checkout, script, "my config.yaml", "eval.limit=5", cwd=elsewhere)
    assert out == f"vlm-pg eval {elsewhere / 'my config.yaml'} eval.limit=5\n"


def test_eval_is_shared_by_all_gpus(checkout: Path) -> None:
    assert run(checkout, "scripts/eval_video.sh", CUDA_VISIBLE_DEVICES="") == "vlm-pg eval\n"
    out = run(checkout, "scripts/eval_video.sh", "eval.limit=5", CUDA_VISIBLE_DEVICES="0,1")
    started = "torchrun --standalone --nproc-per-node=2 --module vlm_pg.cli eval eval.limit=5"
    assert out.splitlines() == ["Starting torchrun: 2 processes", started]


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_dependencies_are_installed_anew(checkout: Path, changed: str) -> None:
    is_installed = ". scripts/setup.sh; if _is_installed; then echo yes; else echo no; fi"
    assert run(checkout, "-c", is_installed) == "yes\n"
    (checkout / changed).write_text("# changed\n")
    assert run(checkout, "-c", is_installed) == "no\n"


def test_an_interrupted_set_up_is_repeated(checkout: Path) -> None:
    failing = ". scripts/setup.sh; _install() { return 1; }; (set -e; set_up_environment); _is_installed || echo again"
    (checkout / "constraints.txt").write_text("# changed\n")
    assert run(checkout, "-c", failing).splitlines()[-1] == "again"


def test_without_usable_python_there_is_a_remedy(checkout: Path) -> None:
    (checkout / ".venv/bin/python").unlink()
    script = ". scripts/setup.sh; PYTHON=/no/such/python; set_up_environment 2>&1 || true"
    out = run(checkout, "-c", script)
    assert "No usable Python was found (looked for: /no/such/python).\nNeeded is Python 3.11 or newer" in out
    assert "apt-get install python3 python3-venv" in out


@pytest.mark.parametrize("script", ["train_video.sh", "eval_video.sh"])
def test_help_sets_nothing_up(checkout: Path, script: str) -> None:
    shutil.rmtree(checkout / ".venv")
    out = run(checkout, f"scripts/{script}", "--help")
    assert f"bash scripts/{script}" in out
    assert not (checkout / ".venv").exists()
