"""What a serving process does with a merged model of several tasks: `python docs/examples/predict_tasks.py REGION`.

It prints how many of each task's public rows the region's release gets right.
"""

import sys

import torch

from infra.production import load
from tasks.data import load_public_gate
from tasks.models import build
from tasks.services import open_services

with load(sys.argv[1], poll_seconds=None) as production:
    release = production.release  # verified whole
network = build(release.manifest.network)
network.load_state_dict(release.torch_tensors())
network.eval()

# Any rows will do; these are the public ones that the gate looked at.
rows = load_public_gate(open_services().manifests.resolve(release.manifest.portfolio))
for number, task in enumerate(sorted(release.manifest.network.arguments["heads"])):
    own = rows.features[:, 0] == number
    with torch.no_grad():
        labels = network(torch.tensor(rows.features[own])).argmax(dim=1).numpy()
    print(f"{task}: {(labels == rows.labels[own]).mean():.3f} of {own.sum()} rows")
