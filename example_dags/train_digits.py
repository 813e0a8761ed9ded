"""The same training as a script with arguments, as one would start it with torchrun."""

import argparse

import digits

import rankzero.train as rt

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=4e-3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=25)
arguments = parser.parse_args()

data = digits.prepare()
state = digits.train(data, epochs=arguments.epochs, lr=arguments.learning_rate, batch_size=arguments.batch_size)
rt.set_result({"accuracy": digits.accuracy(state, data), "world_size": rt.get_context().world_size})
