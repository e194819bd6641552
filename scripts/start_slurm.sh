#!/usr/bin/env bash
# A SLURM of one node on the loopback, for the tests marked `slurm`: installs it where it may (root,
# Debian or Ubuntu), starts it, and says why where it cannot.
#
#     scripts/start_slurm.sh FOLDER      # writes configuration, state and logs there
#     eval "$(scripts/start_slurm.sh --environment FOLDER)" && squeue
#     scripts/start_slurm.sh --stop FOLDER
#
# Exit codes: 0 it runs; 75 it cannot be had here; 1 it was had and does not run.
set -euo pipefail

unavailable() {
    echo "start_slurm: $1" >&2
    exit 75
}

configure() {
    local folder="$1" host cores memory
    host="$(hostname -s)"
    cores="$(nproc)"
    memory="$(($(awk '/^MemTotal/ { print $2 }' /proc/meminfo) / 1024 * 9 / 10))"
    mkdir -p "$folder/state" "$folder/spool"
    # More cores than there are, so that a job that drives and two that work fit a small machine.  A
    # requeued job starts when its credentials have expired, after two minutes by default.
    cat >"$folder/slurm.conf" <<END
ClusterName=daskinfer
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=5
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$((cores > 8 ? cores : 8)) RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

install_packages() {
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && return
    command -v apt-get >/dev/null || unavailable "no apt-get to install slurm-wlm and munge with"
    local quiet=(env DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq)
    if ! { "${quiet[@]}" update && "${quiet[@]}" install -y --no-install-recommends slurm-wlm munge; } \
        >/dev/null 2>&1; then
        unavailable "apt-get cannot install slurm-wlm and munge (no network?)"
    fi
}

# Waits until a command succeeds, 30 s at most.
until_ok() {
    local tries
    for ((tries = 0; tries < 150; tries++)); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    echo "start_slurm: after 30 s still not: $*" >&2
    return 1
}

start() {
    local folder
    [ "$(id -u)" = 0 ] || unavailable "only root may run slurmd and munged"
    mkdir -p "$1"
    folder="$(realpath "$1")"
    install_packages
    configure "$folder"
    if ! SLURM_CONF="$folder/slurm.conf" timeout 5 scontrol ping >/dev/null 2>&1; then
        dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 status=none
        chmod 600 "$folder/munge.key"
        munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
            --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
            --seed-file="$folder/munged.seed" --num-threads=2
        slurmctld -f "$folder/slurm.conf" -c
        slurmd -f "$folder/slurm.conf"
    fi
    export SLURM_CONF="$folder/slurm.conf"
    if ! until_ok timeout 5 scontrol ping || ! until_ok idle; then
        tail -n 20 "$folder"/*.log >&2
        exit 1
    fi
}

idle() {
    [ "$(timeout 5 sinfo -h -o %T)" = idle ]
}

# Ends the jobs, then the daemons, and waits until they are gone: slurmctld saves its state on the way
# out, into a folder that the caller may be about to remove.
stop() {
    local folder="$1" name pid
    export SLURM_CONF="$folder/slurm.conf"
    if timeout 5 scancel --full --user=root 2>/dev/null; then
        until_ok jobless || true
    fi
    for name in slurmd slurmctld munged; do
        [ -f "$folder/$name.pid" ] || continue
        pid="$(cat "$folder/$name.pid")"
        kill "$pid" 2>/dev/null || continue
        until_ok gone "$pid" || kill -KILL "$pid" 2>/dev/null || true
    done
}

jobless() {
    [ -z "$(timeout 5 squeue -h)" ]
}

gone() {
    ! kill -0 "$1" 2>/dev/null || grep -q '^State:[[:space:]]*Z' "/proc/$1/status" 2>/dev/null
}

case "${1:-}" in
    --stop) stop "$(realpath "$2")" ;;
    --environment) echo "export SLURM_CONF=$(printf %q "$(realpath "$2")/slurm.conf")" ;;
    "" | -*) echo "usage: start_slurm.sh [--stop | --environment] FOLDER" >&2 && exit 2 ;;
    *) start "$1" ;;
esac
