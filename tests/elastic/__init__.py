"""Kill replicas of a training at random, and compare it with one process that has the same members in each step."""
