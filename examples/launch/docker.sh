#!/usr/bin/env bash
# In a container, on all GPUs of this machine: builds the image of the Dockerfile beside this if need be, and trains in it.
#
#   DATA=/data OUT=/experiments TRAIN="train.py --config bc.json" bash docker.sh
#   DRY_RUN=1 bash docker.sh
set -euo pipefail

IMAGE=${IMAGE:-ddpshim-train}
CODE=${CODE:-$PWD}                                            # mounted at /work, where the trainer starts
DATA=${DATA:-$PWD}                                            # mounted read-only at /data
OUT=${OUT:-$PWD/out}                                          # mounted at /out: the experiments, kept when the container goes
GPUS=${GPUS:-all}                                             # all, none, or device=2,3
TRAIN=${TRAIN:-"-m robomimic.scripts.train --config bc.json"} # a script, or -m and a module; then its arguments
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

problems=()
[[ $GPUS =~ ^(all|none|device=[0-9]+(,[0-9]+)*)$ ]] || problems+=("GPUS='$GPUS': give all, none or device=2,3")
for name in CODE DATA; do
    [[ -d ${!name} ]] || problems+=("$name='${!name}' is no folder")
done
if ((${#problems[@]})); then
    printf '%s\n' "${problems[@]}" >&2
    exit 2
fi
read -r -a train <<<"$TRAIN"

# --init: signals reach `run`, which passes them to the ranks; docker stop waits 10 s unless told otherwise.
# --ipc=host: data workers and nccl share memory, of which a container has only 64 MiB.
options=(--rm --init --stop-timeout=90 --ipc=host --ulimit memlock=-1
    --volume "$CODE:/work" --volume "$DATA:/data:ro" --volume "$OUT:/out")
[[ $GPUS == none ]] || options+=(--gpus "$GPUS")
build=(docker build --tag "$IMAGE" --file "$here/Dockerfile" "$here/../..")
command=(docker run "${options[@]}" "$IMAGE" --nproc=auto --log-dir=/out/logs "${train[@]}")

echo "image    $IMAGE"
echo "mounted  $CODE as /work, $DATA as /data (read-only), $OUT as /out"
echo "command  ${command[*]}"
[[ ${DRY_RUN:-0} == 0 ]] || exit 0
command -v docker >/dev/null || { echo "no docker here" >&2; exit 2; }
mkdir -p "$OUT" # else docker makes it, as root's
docker image inspect "$IMAGE" >/dev/null 2>&1 || "${build[@]}"
exec "${command[@]}"
