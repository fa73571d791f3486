"""Two nodes of one process each, on loopback, against one node of two: by the deepspeed launcher and by torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Running, environment, free_port

README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def deepspeed_node(folder, rank, port):
    hosts = folder / "hosts"
    hosts.write_text("node-a slots=1\nnode-b slots=1\n")
    return [
        BIN / "deepspeed", "--hostfile", hosts, "--no_ssh", "--node_rank", rank, "--master_addr", "127.0.0.1",
        "--master_port", port, "--log_level=error",
    ]  # fmt: skip


def torchrun_node(_, rank, port):
    return [
        BIN / "torchrun", "--nnodes", 2, "--nproc_per_node", 1, "--node_rank", rank, "--master_addr", "127.0.0.1",
        "--master_port", port,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("node", [deepspeed_node, torchrun_node])
def test_two_nodes_of_one_process_are_one_node_of_two(tmp_path, wikitext_folder, tokenizer_folder, node):
    options = {"use_real_data": True, "dataset": wikitext_folder, "tokenizer": tokenizer_folder}
    options |= {"batch_size": 2, "learning_rate": 3e-3}
    env = environment(OMP_NUM_THREADS="1")  # else a node of one process would give it all cores: sums in another order
    with Running(tmp_path / "one node", "bf16_full", env=env, **options) as running:
        one_node = running.end()
    port, csv = free_port(), tmp_path / "shared" / "loss.csv"
    options |= {"loss_log_file": csv, "checkpoint_dir": tmp_path / "shared" / "kept"}
    commands = [list(map(str, node(tmp_path, rank, port))) for rank in (0, 1)]
    with (
        Running(tmp_path / "node 0", "bf16_full", command=commands[0], env=env, **options) as first,
        Running(tmp_path / "node 1", "bf16_full", command=commands[1], env=env, **options) as second,
    ):
        codes = [first.end().code, second.end().code]
    assert codes == [0, 0], first.text + second.text
    first.csv = csv
    run = first.end()
    assert run.losses == one_node.losses
    assert (run.record["world_size"], run.record["data_fingerprint"]) == (2, one_node.record["data_fingerprint"])
    assert "RESULT" in first.text and "RESULT" not in second.text and "step 8/8" not in second.text
    written = sorted(path.name for path in csv.parent.iterdir())
    assert written == ["kept", "loss.csv", "loss.json"], "global rank 0 alone writes"


def slurm_script():
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", README, re.DOTALL)
    return script


def test_the_slurm_script_is_sound(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(slurm_script())
    subprocess.run(["bash", "-n", path], check=True)
    done = subprocess.run([BIN / "shellcheck", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_slurm_script_s_training_line_trains(tmp_path):
    """With an `srun` and a `scontrol` that do for two tasks of one machine what SLURM's do."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tools / "srun").write_text(
        '#!/bin/bash\nfor task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" & done\n'
        "wait -n && wait -n\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    small = "--num_layers 1 --hidden_dim 32 --num_heads 2 --seq_length 32 --num_steps 6"
    small += " --dataset builtin --tokenizer builtin"
    script = slurm_script().replace("python train.py", f"python '{ROOT}/train.py'")
    script = script.replace("configs/", f"{ROOT}/configs/")
    script = re.sub(r"--num_layers 32 .*?--activation_checkpointing", small, script, flags=re.DOTALL)
    assert small in script
    env = environment(PATH=f"{tools}:{BIN}:/usr/bin:/bin", SLURM_JOB_ID=str(free_port()), SLURM_JOB_NODELIST="x",
                      SLURM_NTASKS_PER_NODE="2")  # fmt: skip
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("baseline", "bf16_full"):
        assert len((tmp_path / "logs" / f"{name}_loss.csv").read_text().splitlines()) == 7
        assert (tmp_path / "logs" / "checkpoints" / name / "step_00000006").is_dir()
