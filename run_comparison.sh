#!/usr/bin/env bash
# Train every config with the same arguments, one run after another, then draw the comparison and print its tables.
set -euo pipefail

relative() { # PATH: as seen from the working directory, so that records name no machine's folders
  realpath -m --relative-to=. -- "$1"
}

here=$(relative "$(dirname -- "${BASH_SOURCE[0]}")")

# Options that go to train.py as they are, and those that steer this script.
train_options=(num_layers hidden_dim num_heads vocab_size seq_length batch_size gradient_accumulation_steps num_steps
  warmup_steps learning_rate zero_stage dataset tokenizer eval_interval eval_batches log_interval
  checkpoint_interval keep_checkpoints)
script_options=(configs seed seeds num_gpus log_dir output)
declare -A option=([configs]='baseline,bf16_full,bf16_full_sr')

usage() {
  cat <<EOF
usage: run_comparison.sh [--OPTION VALUE]...

Trains each config with the same arguments, tees each run to LOG_DIR/NAME.log, then runs plot_loss.py. Runs that have
several seeds are named NAME_seedN, and the order of the configs alternates from seed to seed. SIGTERM, SIGUSR1 or
Ctrl-C stops after the current step, with a checkpoint where --checkpoint_interval or --resume is given.
With GPUs: 32 layers x 4096 wide, 1000 steps of Wikitext-103, on all of them. Without: a small model on two CPU ranks.

  --configs A,B,...        names under configs/, the reference first (default: ${option[configs]})
  --seed N                 of weights, data order and rounding (default: 42)
  --seeds N,M,...          several, in place of --seed
  --num_gpus N             GPUs, or CPU ranks (default: all GPUs; 2 CPU ranks)
  --log_dir DIR            CSVs, run records and logs (default: logs/ beside this script)
  --output PNG             the figure (default: loss_comparison.png beside this script, or in --log_dir if given)
  --activation_checkpointing, --no_activation_checkpointing
                           recompute activations in backward (default: with GPUs only)
  --resume                 skip the runs that are completed, continue the others from their newest checkpoint
                           (LOG_DIR/checkpoints/NAME, written every --checkpoint_interval steps and when stopped)
  --dry_run                print the commands and stop
  --help                   this text

Passed on to train.py, which explains them (train.py --help):
$(printf '  --%s\n' "${train_options[@]}")
EOF
}

die() {
  echo "run_comparison.sh: error: $1" >&2
  exit 2
}

parse_options() {
  while (($#)); do
    local name=${1#--} value=''
    [[ $1 == --* ]] || { usage >&2; die "unexpected argument $1"; }
    [[ $name == *=* ]] && { value=${name#*=} name=${name%%=*}; set -- "--$name" "$value" "${@:2}"; }
    case $name in
      help) usage; exit 0 ;;
      dry_run) option[dry_run]=1; shift ;;
      resume) option[resume]=1; shift ;;
      activation_checkpointing) option[checkpointing]=1; shift ;;
      no_activation_checkpointing) option[checkpointing]=0; shift ;;
      *)
        [[ " ${train_options[*]} ${script_options[*]} " == *" $name "* ]] ||
          { usage >&2; die "unknown option $1"; }
        (($# > 1)) || die "option $1 needs a value"
        option[$name]=$2
        shift 2
        ;;
    esac
  done
}

preset() { # NAME=VALUE...: defaults for what the user did not give
  local pair
  for pair in "$@"; do
    [[ -n ${option[${pair%%=*}]+given} ]] || option[${pair%%=*}]=${pair#*=}
  done
}

choose_preset() {
  local gpus=0
  if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  fi
  if ((gpus)); then
    echo "Preset: 6.86-billion-parameter model on $gpus GPUs (nvidia-smi lists them)."
    preset num_gpus="$gpus" num_layers=32 hidden_dim=4096 num_heads=32 batch_size=1 num_steps=1000 \
      eval_interval=100 checkpointing=1
  else
    echo "Preset: small model on two CPU ranks (nvidia-smi lists no GPU)."
    export DS_ACCELERATOR=cpu
    preset num_gpus=2 num_layers=4 hidden_dim=128 num_heads=4 seq_length=256 batch_size=4 num_steps=300 \
      dataset=builtin tokenizer=builtin eval_interval=50 checkpointing=0
  fi
}

run() { # LOG COMMAND...: the command's own exit code, everything it prints also in LOG
  local log=$1 code=0 output printer
  shift
  exec {output}> >(exec tee --ignore-interrupts -- "$log")
  printer=$!
  # In a session of its own, so that a signal goes once to each of its processes: launchers do not pass all of them on.
  setsid -- "$@" >&"$output" 2>&1 &
  group=$!
  exec {output}>&-
  [[ -z $stop_signal ]] || stop "$stop_signal"
  while wait "$group" || code=$?; kill -0 "$group" 2>/dev/null; do code=0; done # a signal ends a wait early
  group=''
  wait "$printer" || true
  return "$code"
}

group='' stop_signal=''
stop() { # SIGNAL: passed on to everything that runs
  stop_signal=$1
  [[ -z $group ]] || kill -s "$1" -- "-$group" 2>/dev/null || true
}
trap 'stop TERM' TERM USR1
trap 'stop INT' INT

run_name() { # CONFIG SEED
  if ((${#seeds[@]} > 1)); then echo "$1_seed$2"; else echo "$1"; fi
}

train_one() { # CONFIG SEED
  local name started code=0 key status differs
  name=$(run_name "$1" "$2")
  local csv=$log_dir/${name}_loss.csv log=$log_dir/$name.log given=("seed=$2")
  local record=${csv%.csv}.json
  local command=(deepspeed "--num_gpus=${option[num_gpus]}" "--master_port=$(free_port)" --log_level=error
    "$here/train.py" --deepspeed_config "$here/configs/$1.json" --use_real_data --loss_log_file "$csv" --seed "$2")
  for key in "${train_options[@]}"; do
    [[ -n ${option[$key]+given} ]] && command+=("--$key" "${option[$key]}") given+=("$key=${option[$key]}")
  done
  ((option[checkpointing])) && command+=(--activation_checkpointing)
  if [[ -n ${option[checkpoint_interval]+given}${option[resume]+given} ]]; then
    command+=(--checkpoint_dir "$log_dir/checkpoints/$name")
  fi
  if [[ -n ${option[resume]+given} ]]; then
    command+=(--resume)
    if [[ $(status_of "$record") == completed ]]; then
      differs=$(differing "$record" "${given[@]}")
      [[ -z $differs ]] || die "$record is of a completed run with $differs: choose another --log_dir"
      echo "== $name: completed already"
      return
    fi
  fi
  if [[ -n ${option[dry_run]+given} ]]; then
    printf '%q ' "${command[@]}"
    echo
    return
  fi
  echo "== $name"
  started=$(mktemp)
  run "$log" "${command[@]}" || code=$?
  # The launcher's exit code is not the run's: one that is killed can exit with 0, one that is told to stop with 1.
  status=failed
  [[ $record -nt $started ]] && status=$(status_of "$record")
  rm -f -- "$started"
  case $status in
    completed) ;;
    interrupted*)
      echo "run_comparison.sh: $name $status; --resume goes on from its checkpoint, if it has one" >&2
      if [[ $stop_signal == INT ]]; then exit 130; else exit 143; fi
      ;;
    *)
      echo "run_comparison.sh: error: $name failed, see $log" >&2
      exit $((code ? code : 1))
      ;;
  esac
  [[ -z $stop_signal ]] || exit 143
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

status_of() { # RECORD: its status, nothing if there is none
  python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["status"])' "$1" 2>/dev/null || true
}

differing() { # RECORD NAME=VALUE...: what the run was given otherwise
  python3 -c '
import json, sys
def number(text):
    try: return float(text)
    except (TypeError, ValueError): return str(text)
arguments = json.load(open(sys.argv[1]))["arguments"]
given = dict(pair.split("=", 1) for pair in sys.argv[2:])
print(", ".join(f"{name} {arguments.get(name)}" for name, value in given.items()
                if number(arguments.get(name)) != number(value) and "checkpoint" not in name))
' "$@"
}

plot() {
  local command=(python3 "$here/plot_loss.py") name seed
  for name in "${configs[@]}"; do
    for seed in "${seeds[@]}"; do
      command+=(--run "$name=$log_dir/$(run_name "$name" "$seed")_loss.csv")
    done
  done
  command+=(--output "${option[output]}" --summary "$log_dir/summary.md")
  if [[ -n ${option[dry_run]+given} ]]; then
    printf '%q ' "${command[@]}"
    echo
  else
    "${command[@]}"
  fi
}

train_all() {
  local i seed
  for seed in "${!seeds[@]}"; do
    for i in "${!configs[@]}"; do
      # Every other seed backwards, so that a machine that slows down does not favour one config.
      ((seed % 2)) && i=$((${#configs[@]} - 1 - i))
      train_one "${configs[i]}" "${seeds[seed]}"
    done
  done
}

parse_options "$@"
[[ -z ${option[seed]+given} || -z ${option[seeds]+given} ]] || die "give --seed or --seeds, not both"
choose_preset
IFS=, read -ra configs <<<"${option[configs]}"
IFS=, read -ra seeds <<<"${option[seeds]-${option[seed]-42}}"
for name in "${configs[@]}"; do
  [[ -f $here/configs/$name.json ]] || die "no config $here/configs/$name.json"
done
preset output="${option[log_dir]:-$here}/loss_comparison.png" log_dir="$here/logs"
log_dir=$(relative "${option[log_dir]}")
command -v deepspeed >/dev/null || die "deepspeed is not installed: pip install -r requirements.txt"
[[ -n ${option[dry_run]+given} ]] || mkdir -p -- "$log_dir"
train_all
plot
