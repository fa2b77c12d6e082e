"""Everything that can go wrong, by name."""

import os
import signal
import subprocess
import sys
import time

import torch

kind = sys.argv[1]
if kind == "path":
    with open("no/such/data.json"):
        pass
elif kind == "shape":
    layer = torch.nn.Linear(8, 8).cuda()
    layer(torch.zeros(2, 9, device="cuda")).sum().backward()
elif kind == "idle":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
elif kind == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif kind == "nvml":
    import pynvml

    pynvml.nvmlInit()
    held = torch.zeros(1 << 28, device="cuda", dtype=torch.uint8)
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert memory.used > 1 << 28 and memory.total == torch.cuda.mem_get_info()[1]
elif kind == "smi":
    asked = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    index, name, total = subprocess.check_output(asked, text=True).strip().split(", ")
    assert index == "0" and name == torch.cuda.get_device_name(0) and int(total) == torch.cuda.mem_get_info()[1] >> 20
elif kind == "workers":
    loader = torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4), batch_size=4, num_workers=2, pin_memory=True)
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in loader:
        model(batch.to("cuda")).sum().backward()
        optimizer.step()
elif kind == "branch":
    weight = torch.ones(4, device="cuda", requires_grad=True)
    for _ in range(3):
        if (weight.sum() * 1).item() > 100:
            torch.zeros(1 << 20, device="cuda")
        weight.sum().backward()
        torch.optim.SGD([weight], 0.1).step()
elif kind == "spawn" and __name__ == "__main__":
    import torch.multiprocessing as mp

    with mp.get_context("spawn").Pool(1) as pool:
        assert pool.apply(abs, (-3,)) == 3
elif kind == "recurrent":
    lstm = torch.nn.LSTM(16, 32, 2, batch_first=True).cuda()
    convolution = torch.nn.Conv1d(32, 8, 3).cuda()
    optimizer = torch.optim.AdamW([*lstm.parameters(), *convolution.parameters()])
    for _ in range(3):
        out, _ = lstm(torch.zeros(4, 10, 16, device="cuda"))
        convolution(out.transpose(1, 2)).mean().backward()
        optimizer.step()
