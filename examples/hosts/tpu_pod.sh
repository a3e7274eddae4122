#!/bin/bash
# TPU=my-pod ZONE=us-central2-b bash examples/hosts/tpu_pod.sh
#
# Once on each host of a Cloud TPU pod, where this repository and kmp are installed; RUN is a
# directory that all of them mount. JAX asks the pod's metadata who the others are.
gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="
  cd kmp && KERAS_BACKEND=jax python examples/several_hosts.py --directory '$RUN'"
