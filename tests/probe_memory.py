"""Run under the launcher: the named configs at every ZeRO stage, one step each; print predicted and measured bytes."""

import gc
import json
import sys
from pathlib import Path

from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import measured_memory
import train

CONFIGS = Path(train.__file__).parent / "configs"
# Nothing here divides evenly: neither by the ranks nor by ZeRO's alignment.
MODEL = "--num_layers 3 --hidden_dim 45 --num_heads 3 --vocab_size 257 --seq_length 32".split()


def storages(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}


def counts_what_the_accessors_show(engine):
    """Whether the tensors counted are those behind DeepSpeed's accessors of local state (which ZeRO-3 alone has)."""
    live, parameters = measured_memory.live_tensors(engine), list(engine.module.parameters())
    shown = {"master weights": [safe_get_local_fp32_param(p) for p in parameters]}
    for key in ("exp_avg", "exp_avg_sq"):
        shown[key] = [safe_get_local_optimizer_state(p, key) for p in parameters]
    return all(storages(tensors) == storages(live[name]) for name, tensors in shown.items())


def probe(name, stage):
    path = CONFIGS / f"{name}.json"
    args = train.parse_args(["--deepspeed_config", str(path), *MODEL])
    config, _ = train.resolve_config(train.read_config(path), 2, 1, None, stage)
    batches = train.build_batches(args, 2, None, train.Interruption())
    plan = train.memory_plan(args, config, 2)
    engine = train.build_engine(train.build_model(args, config, "cpu"), config, args.seed)
    engine.backward(engine(next(batches)[0]))
    engine.step()
    report = {"config": name, "stage": stage, "memory": plan.measure(engine)}
    report["accessors"] = counts_what_the_accessors_show(engine) if stage == 3 else None
    engine.destroy()
    return report


def main():
    names = [name for name in sys.argv[1:] if not name.startswith("--")]  # the launcher adds --local_rank
    train.start_process(train.parse_args(["--deepspeed_config", names[0]]))
    reports = []
    for name in names:
        for stage in (1, 2, 3):
            reports.append(probe(name, stage))
            gc.collect()  # an engine holds itself: without this, the buffers of fifteen of them pile up
    if train.dist.get_rank() == 0:
        print("PROBE " + json.dumps(reports), flush=True)
    train.dist.destroy_process_group()


if __name__ == "__main__":
    main()
