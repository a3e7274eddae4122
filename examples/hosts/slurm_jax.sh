#!/bin/bash
# sbatch examples/hosts/slurm_jax.sh
#
# One task for each GPU: JAX gives a task the GPU of its number on the host alone. It reads SLURM's
# variables for the rest. If a host is lost, SLURM starts the job again; if a process is, the last line.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
export KERAS_BACKEND=jax
srun --kill-on-bad-exit=1 python examples/several_hosts.py --directory "${RUN:-logs/several_hosts}" \
  || scontrol requeue "$SLURM_JOB_ID"
