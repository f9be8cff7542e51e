"""Disaggregated serving with vLLM and kvpool on one machine, with one command.

    python examples/vllm_disaggregated/run.py --model MODEL

starts a store, a prefill server, a decode server and the proxy in front of them, prints where they
are as one line of JSON, and ends them all on Ctrl-C. Needs vLLM and kvpool in the environment of
the interpreter that runs it. Options after `--` go to both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aiohttp import ClientError, ClientSession, web
from proxy import Proxy

STOP_S = 20.0


@contextlib.contextmanager
def running(command: list[str], log: Path, **pipes: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all that it starts, ended together at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def store(folder: Path, capacity: str) -> Iterator[str]:
    """A daemon that is ready; its address."""
    program = "from kvpool.cli import main; main()"
    socket = folder / "kvpool.sock"
    command = [sys.executable, "-c", program, "serve", "--json", "--socket", str(socket)]
    command += ["--capacity", capacity]
    with running(command, folder / "store.log", stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        if not daemon.stdout.readline():
            sys.exit(f"the store did not start:\n{(folder / 'store.log').read_text()}")
        yield f"unix:{socket}"


def server(options: argparse.Namespace, port: int, role: str, address: str) -> list[str]:
    """The command of one vLLM server."""
    transfer = {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.client.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **json.loads(options.connector)},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options.vllm]
    return [*command, "--kv-transfer-config", json.dumps(transfer)]


async def healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the server at `url` answers."""
    async with ClientSession() as http:
        while process.poll() is None:
            with contextlib.suppress(ClientError):
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
    sys.exit(f"{url} did not start:\n{log.read_text()[-4000:]}")


async def serve(options: argparse.Namespace, folder: Path, address: str) -> None:
    ports = range(options.port + 1, options.port + 3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        servers = []
        for role, port in zip(("kv_producer", "kv_both"), ports, strict=True):
            log = folder / f"{role}.log"
            command = server(options, port, role, address)
            # What vLLM prints belongs into its log, ours is the one line of JSON.
            servers.append(stack.enter_context(running(command, log, stdout=sys.stderr.fileno())))
        logs = [folder / "kv_producer.log", folder / "kv_both.log"]
        await asyncio.gather(*map(healthy, urls, servers, logs))
        runner = web.AppRunner(Proxy(*urls).application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", options.port).start()
        where = {"proxy": f"http://127.0.0.1:{options.port}", "store": address}
        for name, url, process in zip(("prefill", "decode"), urls, servers, strict=True):
            where[name], where[f"{name}_pid"] = url, process.pid
        print(json.dumps(where), flush=True)
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a name or a folder, as vLLM takes it")
    parser.add_argument(
        "--port", type=int, default=8000, help="of the proxy; servers have the next"
    )
    parser.add_argument("--capacity", default="2GiB", help="of the store")
    parser.add_argument("--connector", default="{}", help="more settings of the connector, as JSON")
    parser.add_argument("vllm", nargs="*", help="options of both servers, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpool-") as name:
        folder = Path(name)
        with store(folder, options.capacity) as address:
            asyncio.run(serve(options, folder, address))


if __name__ == "__main__":
    main()
