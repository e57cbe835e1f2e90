#!/usr/bin/env bash
# All that a machine with GPUs can show of this project: tools/one_gpu.py with an NCCL that lets ranks share a
# GPU, if one is packed (PACKED_NCCL, or .gpu/libnccl.so.2.xz), and an MPS daemon of its own where there is one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} packed=${PACKED_NCCL:-$here/../.gpu/libnccl.so.2.xz}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ " $* " == *" --dry-run "* ]]; then
    CUDA_VISIBLE_DEVICES="" "$python" "$here/one_gpu.py" "$@"
    exit
fi
# NCCL's own watchdog would end a process that a stage's limit is for.
export NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_NCCL_ENABLE_MONITORING=0
export GLOO_SOCKET_IFNAME=lo PYTHONUNBUFFERED=1
if [[ -f $packed ]]; then
    # NVLS can't be had by ranks on one GPU.
    export NCCL_NVLS_ENABLE=0 NCCL_MULTI_RANK_GPU_ENABLE=1 LD_PRELOAD=$scratch/libnccl.so.2
    LD_PRELOAD="" "$python" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
        "$packed" "$LD_PRELOAD"
fi
if command -v nvidia-cuda-mps-control > /dev/null; then # without it the ranks take turns: right, but 20 times slower
    export CUDA_MPS_PIPE_DIRECTORY=$scratch/mps CUDA_MPS_LOG_DIRECTORY=$scratch/mps.log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if nvidia-cuda-mps-control -d; then
        trap 'echo quit | nvidia-cuda-mps-control > /dev/null 2>&1 || true; rm -rf "$scratch"' EXIT
    else # with the variable unset, the default daemon is somebody else's to end
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
fi
"$python" "$here/one_gpu.py" "$@"
