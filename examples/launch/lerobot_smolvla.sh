#!/usr/bin/env bash
# SmolVLA, fine-tuned from its published weights by LeRobot's trainer, unedited, on all GPUs of one machine:
#
#   DATASET=you/your_data OUTPUT=outputs/train/mine bash lerobot_smolvla.sh
#   DRY_RUN=1 bash lerobot_smolvla.sh         # show what would be started, and start nothing
#
# The settings are those of lerobot_template.sh, with other defaults.
set -euo pipefail

export POLICY=${POLICY:-lerobot/smolvla_base}
export DATASET=${DATASET:-lerobot/svla_so101_pickplace}
export BATCH_SIZE=${BATCH_SIZE:-64} # of all GPUs together
export STEPS=${STEPS:-20000}
export SAVE_FREQ=${SAVE_FREQ:-5000}
export PRECISION=${PRECISION:-bf16}
exec bash "$(dirname "$0")/lerobot_template.sh" "$@"
