"""How soon the lab's page is seen, and how large it is; against the page of `gaugekit inspect --html` with plotly.

    python benchmarks/bench_lab.py [--tries 5]

First contentful paint as Chromium reports it, in a new profile each time, of the page that the package brings, served
by the lab; and until the page computes (the numbers of a room stand there). The other page is opened from disk.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import transformers
import uvicorn
from playwright.sync_api import sync_playwright

from gaugekit.lab.app import STATIC, application
from gaugekit.lab.reports import Reports
from gaugekit.lab.server import listen
from gaugekit.report.html import write_html
from gaugekit.verbs.inspect import inspect

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def seconds(playwright: Any, address: str, ready: str) -> tuple[float, float]:
    """To the first paint, and until a selector is there."""
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
    page = browser.new_page()
    start = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(ready, state="attached")
    done = time.perf_counter() - start
    page.wait_for_function(f"{PAINT} !== undefined")
    paint = page.evaluate(PAINT) / 1000
    browser.close()
    return paint, done


def inspected(folder: Path) -> Path:
    """The page of a report on a small model."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 100, "num_hidden_layers": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    model.save_pretrained(folder / "model")
    write_html(inspect(folder / "model"), folder / "inspect.html")
    return folder / "inspect.html"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=5)
    tries = parser.parse_args().tries
    bound = listen(0)
    server = uvicorn.Server(uvicorn.Config(application(Reports()), log_level="error", lifespan="off"))
    threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True).start()
    files = [file for file in STATIC.rglob("*") if file.is_file()]
    packed = sum(len(gzip.compress(file.read_bytes())) for file in files)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        other = inspected(Path(scratch))
        sides = {
            "lab": (f"http://127.0.0.1:{bound.getsockname()[1]}/", "[data-number]"),
            "inspect --html": (other.as_uri(), ".main-svg"),
        }
        sizes = {"lab": sum(file.stat().st_size for file in files), "inspect --html": other.stat().st_size}
        found: dict[str, list[tuple[float, float]]] = {what: [] for what in sides}
        for _ in range(tries):
            for what, (address, ready) in sides.items():
                found[what].append(seconds(playwright, address, ready))
    first = None
    for what, times in found.items():
        paint, done = (statistics.median(column) for column in zip(*times, strict=True))
        first = first or paint
        worst = max(each[0] for each in times)
        print(
            f"{what:15} {sizes[what] / 1e3:8.0f} kB  first paint {1000 * paint:5.0f} ms (worst {1000 * worst:.0f}), "
            f"ready {1000 * done:5.0f} ms; paint x{paint / first:.2f}"
        )
    print(f"the lab's files packed by gzip: {packed / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
