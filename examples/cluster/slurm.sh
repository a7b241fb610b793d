#!/usr/bin/env bash
#SBATCH --job-name=surefoot
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch examples/cluster/slurm.sh RECIPE [KEY=VALUE ...]
#
# Two minutes before the limit Slurm tells this script, which tells the run. The run saves and ends
# with 75, and the job goes back into the queue. Any other exit code is the job's own: 0 is done, and
# with 2 or 3 the same command would end in the same way again.
told=no
surefoot train "$@" run.grace=100 &
run=$!
# Passed on once: a second signal would end the run at once.
trap 'trap "" USR1 TERM; told=yes; kill -USR1 "$run"' USR1 TERM
wait "$run"
code=$?
if [ "$told" = yes ]; then # then `wait` was cut off, and the run was not
  wait "$run"
  code=$?
fi
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
