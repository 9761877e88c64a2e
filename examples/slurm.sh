#!/bin/bash
# One node of four hosts with eight GPUs each, which goes on with three: `sbatch examples/slurm.sh`, in a folder that all of
# them have, with a node.toml in it.
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --signal=TERM@60 --requeue --no-kill
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --no-kill --kill-on-bad-exit=0 farloop node node.toml --nproc "${GPUS:-8}" \
	--set "node.hosts=${HOSTS:-3:4}" --set "node.rendezvous=$host:${PORT:-29500}"
