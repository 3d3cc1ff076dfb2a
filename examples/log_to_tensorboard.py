"""Log a run to TensorBoard while it runs.

pip install 'fedbilevel[tensorboard]'
python examples/log_to_tensorboard.py logs
tensorboard --logdir logs          # needs the package tensorboard
"""

import sys

from fedbilevel import TensorBoard
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import Quadratic

folder = sys.argv[1] if len(sys.argv) > 1 else "logs"
with TensorBoard(folder) as log:
    for moment in simulation(Quadratic(noise=0.1).build(), FedBiOAcc(), rounds=400).run():
        log(moment)
print(f"x error {moment.metrics['x_error']:.3f} at round {moment.totals.rounds}; logged to {folder}")
