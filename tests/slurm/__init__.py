"""Run jobs that ``lightning-dist launch --on slurm`` submits to real daemons of SLURM on this machine."""
