"""The `nvidia-smi` that a rehearsed script finds: -L, --query-gpu=FIELDS --format=csv[,noheader][,nounits], and a line for each card.

It is a process of its own and cannot see the books of the rank that asks: memory in use is the context's.
"""

from __future__ import annotations

import argparse
import os

MIB = 1 << 20


def _cards() -> list[dict[str, str]]:
    card = {name: os.environ.get(f"LAUNCHGUARD_CARD_{name}", "0") for name in ("NAME", "TOTAL", "CONTEXT", "COUNT", "MAJOR", "MINOR")}
    total, used = int(card["TOTAL"]) // MIB, int(card["CONTEXT"]) // MIB
    shared = {
        "count": card["COUNT"], "name": card["NAME"], "gpu_name": card["NAME"], "driver_version": "virtual",
        "memory.total": f"{total} MiB", "memory.used": f"{used} MiB", "memory.free": f"{total - used} MiB",
        "compute_cap": f"{card['MAJOR']}.{card['MINOR']}", "utilization.gpu": "0 %", "utilization.memory": "0 %", "temperature.gpu": "30",
        "power.draw": "0.00 W",
    }  # fmt: skip
    return [{**shared, "index": str(i), "uuid": f"GPU-00000000-0000-0000-0000-{i:012d}",
             "pci.bus_id": f"00000000:{i + 1:02X}:00.0"} for i in range(int(card["COUNT"]))]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("--query-gpu", default="")
    parser.add_argument("--format", default="csv")
    parser.add_argument("-i", "--id", default="")
    arguments, _ = parser.parse_known_args()
    cards = [card for card in _cards() if not arguments.id or card["index"] in arguments.id.split(",")]
    if arguments.query_gpu:
        fields, options = arguments.query_gpu.split(","), arguments.format.split(",")
        if "noheader" not in options:
            print(", ".join(fields))
        for card in cards:
            values = [card.get(field.strip(), "[N/A]") for field in fields]
            print(", ".join(value.split(" ")[0] if "nounits" in options and field.strip() not in ("name", "gpu_name") else value
                            for field, value in zip(fields, values)))  # fmt: skip
        return
    for card in cards:
        print(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})" + ("" if arguments.list_gpus else f", {card['memory.total']}"))


if __name__ == "__main__":
    main()
