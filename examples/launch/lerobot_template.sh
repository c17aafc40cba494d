#!/usr/bin/env bash
# LeRobot's trainer, unedited, on all GPUs of one machine. Every setting may come from the environment:
#
#   POLICY=act DATASET=lerobot/aloha_sim_insertion_human BATCH_SIZE=8 bash lerobot_template.sh
#   RESUME=1 OUTPUT=outputs/train/act bash lerobot_template.sh   # goes on from the last checkpoint
#   DRY_RUN=1 bash lerobot_template.sh                           # show what would be started, and start nothing
#
# What stands behind the script's name goes to lerobot_train as it is: bash lerobot_template.sh --policy.chunk_size=50
set -euo pipefail

POLICY=${POLICY:-act}           # a policy's type; or a folder or a name on the hub, of a policy to start from
DATASET=${DATASET:-lerobot/pusht} # a name on the hub, or of the data set in ROOT
ROOT=${ROOT:-}                  # the folder of a local data set
OUTPUT=${OUTPUT:-outputs/train/${POLICY##*/}}
GPUS=${GPUS:-auto}              # ranks: a number, gpu, cpu, or auto (all GPUs)
BATCH_SIZE=${BATCH_SIZE:-8}     # of all GPUs together, as in one process; learning rate and steps stay, too
STEPS=${STEPS:-100000}
PRECISION=${PRECISION:-no}      # no, bf16 or fp16: accelerate's mixed precision
WORKERS=${WORKERS:-4}           # data workers of each rank
SAVE_FREQ=${SAVE_FREQ:-20000}   # steps between checkpoints
LOG_FREQ=${LOG_FREQ:-200}
SEED=${SEED:-1000}
WANDB=${WANDB:-0}               # 1: log to Weights & Biases (WANDB_MODE=offline keeps it here)
RESUME=${RESUME:-0}             # 1: go on from the last checkpoint in OUTPUT
PYTHON=${PYTHON:-python}

wrong() { echo "$1" >&2; failed=1; }
failed=0
[[ $GPUS =~ ^([1-9][0-9]*|gpu|cpu|auto)$ ]] || wrong "GPUS='$GPUS': give a number, gpu, cpu or auto"
for name in BATCH_SIZE STEPS SAVE_FREQ LOG_FREQ; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || wrong "$name='${!name}' must be a whole number of at least 1"
done
[[ $WORKERS =~ ^[0-9]+$ ]] || wrong "WORKERS='$WORKERS' is not a whole number"
[[ $PRECISION =~ ^(no|bf16|fp16)$ ]] || wrong "PRECISION='$PRECISION': give no, bf16 or fp16"
[[ $WANDB =~ ^[01]$ && $RESUME =~ ^[01]$ ]] || wrong "WANDB='$WANDB' RESUME='$RESUME': give 0 or 1"
[[ -z $ROOT || -f $ROOT/meta/info.json ]] || wrong "ROOT='$ROOT' holds no data set: meta/info.json is not there"
command -v "$PYTHON" >/dev/null || wrong "PYTHON='$PYTHON' is no program: activate your environment first"
last=$OUTPUT/checkpoints/last/pretrained_model/train_config.json
if [[ $RESUME == 1 ]]; then
    [[ -f $last ]] || wrong "RESUME=1, and $last is not there: start with RESUME=0"
    train=("--config_path=$last" --resume=true "--steps=$STEPS")
else
    [[ ! -e $OUTPUT ]] || wrong "OUTPUT='$OUTPUT' is there already: give another one, or RESUME=1"
    policy=("--policy.type=$POLICY")
    if [[ $POLICY == */* ]]; then policy=("--policy.path=$POLICY"); fi
    train=("${policy[@]}" --policy.push_to_hub=false "--dataset.repo_id=$DATASET" "--output_dir=$OUTPUT"
        "--batch_size=$BATCH_SIZE" "--steps=$STEPS" "--num_workers=$WORKERS" "--save_freq=$SAVE_FREQ"
        "--log_freq=$LOG_FREQ" "--seed=$SEED")
    [[ -z $ROOT ]] || train+=("--dataset.root=$ROOT")
    [[ $WANDB == 0 ]] || train+=(--wandb.enable=true)
fi
[[ $failed == 0 ]] || exit 2

export ACCELERATE_MIXED_PRECISION=$PRECISION
newer="import importlib.util as i; raise SystemExit(i.find_spec('lerobot.configs.accelerator') is None)"
if [[ $PRECISION != no ]] && "$PYTHON" -c "$newer" 2>/dev/null; then # releases after 0.6.1 read no variable
    train+=("--accelerator.mixed_precision=$PRECISION")
fi
command=("$PYTHON" -m ddpshim run "--nproc=$GPUS" -m lerobot.scripts.lerobot_train "${train[@]}" "$@")
echo "policy     $POLICY"
echo "data       $DATASET${ROOT:+ in $ROOT}"
echo "ranks      $GPUS"
echo "batch      $BATCH_SIZE of all ranks together"
echo "steps      $STEPS, a checkpoint every $SAVE_FREQ"
echo "precision  $PRECISION"
echo "workers    $WORKERS for each rank"
echo "W&B        $WANDB"
echo "resume     $RESUME"
echo "output     $OUTPUT"
echo "command    ${command[*]}"
[[ ${DRY_RUN:-0} == 0 ]] || exit 0
exec "${command[@]}"
