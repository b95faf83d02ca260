#!/bin/bash
# Trains with a worker on each NUMA node of some machines. From the folder that
# has .venv and examples:
#
#     sbatch --nodes=4 examples/clusters/slurm.sh --epochs 10
#
# What stands here is for machines of two NUMA nodes with 32 cores each.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# If a worker fails, all start again, and go on after the last saved epoch.
for attempt in 1 2 3; do
  srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    --distribution=block:block --cpu-bind=cores --mem-bind=local \
    .venv/bin/python -u examples/multi_worker.py \
    --slurm --checkpoint_dir "$SLURM_SUBMIT_DIR/checkpoints" "$@" && exit
  echo "Attempt $attempt failed." >&2
done

# A machine may be the reason. Some minutes later Slurm takes those that work.
if ((${SLURM_RESTART_COUNT:-0} < 3)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit 1
