"""Run under the launcher: build the engine at every ZeRO stage, take one step, print what it holds as one JSON line."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train

MODEL = ["--num_layers", "6", "--hidden_dim", "64", "--vocab_size", "256", "--seq_length", "32"]


def build_counting_residents(args, config, device):
    """The model, and the most parameters that were resident on this rank at any moment of its construction."""
    seen, peak = [], 0

    def count(_module, _name, parameter):
        nonlocal peak
        seen.append(parameter)
        peak = max(
            peak,
            sum(p.numel() + (p.ds_tensor.numel() if hasattr(p, "ds_tensor") else 0) for p in seen if p is not None),
        )

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(count)
    model = train.build_model(args, config, device)
    hook.remove()
    return model, peak


def states(engine, stage):
    """(dtypes, bytes): the dtype of every state that the engine keeps, by name; the bytes of the optimizer's."""
    optimizer = engine.optimizer
    flat = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    inner = [optimizer.optimizer.state[p] for p in flat]
    names = {
        "parameters": list(engine.module.parameters()),
        "master_weights": flat,
        "exp_avg": [state["exp_avg"] for state in inner],
        "exp_avg_sq": [state["exp_avg_sq"] for state in inner],
    }
    dtypes = {name: sorted({str(t.dtype) for t in tensors}) for name, tensors in names.items()}
    kept = [tensor for name, tensors in names.items() if name != "parameters" for tensor in tensors]
    return dtypes, sum(tensor.numel() * tensor.element_size() for tensor in kept)


def probe(arguments, stage):
    args = train.parse_args([*arguments, *MODEL, "--zero_stage", str(stage)])
    config, _ = train.resolve_config(train.read_config(args.deepspeed_config), 2, 1, None, args.zero_stage)
    model, peak = build_counting_residents(args, config, "cpu")
    engine = train.build_engine(model, config, args.seed)
    batches = train.build_batches(args, 2, None, train.Interruption())
    gradients, apply = [], engine.optimizer.optimizer.step

    def step(*positional, **named):  # the gradient that the optimizer is handed: the master gradient
        gradients.extend(
            str(p.grad.dtype) for group in engine.optimizer.optimizer.param_groups for p in group["params"]
        )
        return apply(*positional, **named)

    engine.optimizer.optimizer.step = step
    loss = engine(next(batches)[0])
    engine.backward(loss)
    engine.step()
    dtypes, size = states(engine, stage)
    total = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    report = {"stage": stage, "loss": loss.item(), "resident_peak": peak, "parameters": total, "bytes": size}
    return report | {"dtypes": dtypes | {"gradients": sorted(set(gradients))}}


def main():
    arguments = sys.argv[1:]
    args = train.parse_args([*arguments, *MODEL])
    train.start_process(args)
    reports = [probe(arguments, stage) for stage in (1, 2, 3)]
    if train.dist.get_rank() == 0:
        print("PROBE " + json.dumps(reports), flush=True)
    train.dist.destroy_process_group()


if __name__ == "__main__":
    main()
