"""Train on real handwritten digits with Hugging Face Accelerate. syncbn needs one line, convert_syncbn_model.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_digits.py      without GPUs: on CPUs, with gloo
    python examples/accelerate_digits.py                                               one process

Start CPU processes with --multi_gpu too: without mpirun, `accelerate launch --cpu` starts only one process. The
processes share a batch of --batch images, and training is in float64. So the final loss after 3 epochs is 0.1441 with
any number of processes that divides --batch. Prints the loss and the test accuracy. --output FILE writes both as JSON.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from digits import NUM_TEST, accuracy, build_model, load_images
from launch import ManualFormatter
from torch.utils.data import DataLoader, TensorDataset

import syncbn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=ManualFormatter)
parser.add_argument("--epochs", type=int, default=3, help="passes over the 1,500 images")
parser.add_argument("--batch", type=int, default=12, help="images a step, of all processes")
parser.add_argument("--learning-rate", type=float, default=0.01, help="of SGD")
parser.add_argument("--cpu", action="store_true", help="use no GPU")
parser.add_argument("--output", type=Path, help="JSON file to write")
arguments = parser.parse_args()

torch.manual_seed(0)
images, labels = load_images(torch.float64, torch.device("cpu"))
loader = DataLoader(TensorDataset(images[NUM_TEST:], labels[NUM_TEST:]), arguments.batch, drop_last=True)
model = build_model(width=16).double()
model = syncbn.convert_syncbn_model(model)  # the line for syncbn
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9)

use_cpu = arguments.cpu or not torch.cuda.is_available()
# With split_batches each process gets its share of a batch of the loader.
accelerator = Accelerator(cpu=use_cpu, dataloader_config=DataLoaderConfiguration(split_batches=True))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(arguments.epochs):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
final_loss = accelerator.gather(loss.detach().reshape(1)).mean().item()

device = accelerator.device
test_accuracy = accuracy(accelerator.unwrap_model(model), images[:NUM_TEST].to(device), labels[:NUM_TEST].to(device))
result = {"processes": accelerator.num_processes, "final loss": final_loss, "test accuracy": test_accuracy}
accelerator.print(result)
if arguments.output and accelerator.is_main_process:
    arguments.output.write_text(json.dumps(result))
model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)  # before the end of the process group
accelerator.end_training()  # This destroys the process group.
