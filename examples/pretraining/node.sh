#!/bin/bash
# Start the processes of one node of a run with two nodes: bash examples/pretraining/node.sh NAME NODE [HOST:PORT].
# NODE is 1 or 2. HOST is the first node, and both nodes see the working directory.
name=$1 node=$2 head=${3:-127.0.0.1:29400}
if [ "$node" != 1 ]; then  # On one machine, the nodes would otherwise race for the port where they meet.
    until (: < "/dev/tcp/${head%:*}/${head##*:}") 2> /dev/null; do sleep 0.2; done
fi
exec lightning-dist launch --on torchrun --nodes 2 --devices 1 --head "$head" -- \
    fit -c examples/pretraining/base.yaml --trainer.logger.init_args.run_name="$name" \
    --trainer.callbacks.dirpath="checkpoints/$name"
