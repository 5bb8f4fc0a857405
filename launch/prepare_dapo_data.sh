#!/usr/bin/env bash
# Write the two files of the DAPO recipe: DAPO-Math-17k to train on, AIME-2024 to validate on, copies removed.
#
#   launch/prepare_dapo_data.sh                   download both into ./data
#   OVERWRITE=1 launch/prepare_dapo_data.sh       do it again
#   DATA_DIR=/data launch/prepare_dapo_data.sh    another place (with VERL_HOME set: $VERL_HOME/data)
#   FROM_DIR=/copies launch/prepare_dapo_data.sh  no network: read dapo-math-17k.parquet and aime-2024.parquet from there
set -euo pipefail

data_dir=${DATA_DIR:-${VERL_HOME:+$VERL_HOME/data}}
data_dir=${data_dir:-data}
overwrite=${OVERWRITE:-0}

for name in dapo-math-17k aime-2024; do
  if [[ -e $data_dir/$name.parquet && $overwrite != 1 ]]; then
    echo "$data_dir/$name.parquet is there already (OVERWRITE=1 makes it again)"
    continue
  fi
  arguments=(--output "$data_dir")
  if [[ -n ${FROM_DIR:-} ]]; then arguments+=(--from "$FROM_DIR/$name.parquet"); fi
  if [[ $overwrite == 1 ]]; then arguments+=(--overwrite); fi
  ${PYTHON:-python} -m megatron_dapo.cli.main data prepare "$name" "${arguments[@]}"
done
