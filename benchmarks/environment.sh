#!/bin/sh
# Make .bench-venv with memspan and the peers it is measured against, from the package registry.
# labml-nn asks for torchvision, torchtext and fairscale, which its models do not use, and crashes with
# the labml that pip picks: so its packages are pinned and installed without their dependencies. So are
# attention-gym and fla, of which only what is written in PyTorch is measured.
set -eu
cd "$(dirname "$0")/.."
if [ ! -e .bench-venv/.installed ] || [ benchmarks/environment.sh -nt .bench-venv/.installed ]; then
    "${PYTHON:-python3}" -m venv .bench-venv
    pip="./.bench-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt"
    $pip -e '.[plot]'
    $pip --no-deps labml-nn==0.5.1 labml==0.4.168 labml-helpers==0.4.89
    $pip --no-deps attn-gym==0.0.17 fla-core==0.6.0
    $pip gitpython pyyaml einops x-transformers==2.31.10 transformers onnx==1.23.2 onnxruntime==1.32.0
    touch .bench-venv/.installed
fi
