"""Run trainings that ``lightning-dist launch`` gives to real schedulers on this machine, and interrupt them."""
