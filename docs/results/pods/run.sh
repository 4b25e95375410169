#!/usr/bin/env bash
# Makes the reports of this folder, those that are missing: minutes of one core each; needs the extra `plan`.
# 16 chips share each weight everywhere, and every chip holds one sequence.
set -euo pipefail
cd "$(dirname "$0")/../../.."
for target in qwen3_8b qwen3_4b; do
    for slice in "v5p:4x4x4 64" "v5p:8x8x16 1024" "v5e:4x4 16" "v5e:16x16 256" "v6e:16x16 256"; do
        read -r topology chips <<<"$slice"
        out=docs/results/pods/$target-${topology/:/-}
        [ -e "$out.json" ] && continue
        dscout plan "configs/pods/$target.py" --topology "$topology" --batch "$chips" \
            --mesh $((chips / 16)) 16 1 --out "$out"
    done
done
