#!/bin/bash
# sbatch examples/hosts/slurm_torch.sh
#
# One task for each GPU. Keras hands PyTorch the address, the number of processes and which of them
# this is; the GPU is that of LOCAL_RANK. If a host is lost, SLURM starts the job again; if a process
# is, the last line.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
export KERAS_BACKEND=torch
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export KERAS_DISTRIBUTION_JOB_ADDRESSES="$first:${PORT:-29500}"
srun --kill-on-bad-exit=1 bash -c '
  export KERAS_DISTRIBUTION_NUM_PROCESSES=$SLURM_NTASKS
  export KERAS_DISTRIBUTION_PROCESS_ID=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  exec python examples/several_hosts.py --directory "${RUN:-logs/several_hosts}"' \
  || scontrol requeue "$SLURM_JOB_ID"
