"""Python commands as forks of a process that has imported torch: real processes, soon started.

An interpreter takes seconds to import torch and transformers, and the suite starts some three
hundred. A fork server, which is forked before the first test and so has nothing of any, starts
them. What is about an interpreter's own start does not use the fixture `forked`.
"""

import atexit
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import huggingface_hub.constants
import torch
import transformers.dynamic_module_utils
from pytorch_lightning.utilities.rank_zero import rank_zero_only

ROOT = Path(__file__).parents[2]
OURS = ("transformers_modules", "data", "decoding", "models", "recipes", "terminal", "tests",
        "trainers")  # fmt: skip
OPTIONS = ("-P", "-u")
PR_SET_CHILD_SUBREAPER = 36
server = None  # a socket to the fork server; in what it has forked, None


def start_server():
    """Fork the server; its children become this process's, by its right to adopt orphans."""
    global server
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        server.close()
        server = None
        serve(theirs)
    theirs.close()
    atexit.register(server.close)


def serve(channel):
    """Fork a command for each message until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # those of a terminal go to the tests
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, files, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            os._exit(0)
        pid, told = os.pipe()
        between = os.fork()
        if between == 0:  # it ends at once, so that its child is adopted
            child = os.fork()
            if child == 0:
                run(**json.loads(message), files=files)
            os.write(told, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        channel.send(os.read(pid, 20))
        for file in (pid, told, *files):
            os.close(file)


class Forked(subprocess.Popen):
    """A Popen of `python -m module ...` or `python script ...` that forks; any other starts."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        command = [] if isinstance(args, str | bytes | os.PathLike) else [*map(os.fspath, args)]
        program = next((a for a in command[1:] if a not in OPTIONS), "-")
        python = command[:1] == [sys.executable] and (program == "-m" or program[0] != "-")
        if not python or preexec_fn or pass_fds:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
            return super()._execute_child(*given, *rest)
        pipes, session = (
            rest[3:9],
            rest[14],
        )  # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        files = [pipes[0], pipes[3], pipes[5]]
        files = [own if file == -1 else file for own, file in enumerate(files)]
        job = {
            "command": command[1:],
            "cwd": os.fspath(cwd or os.getcwd()),
            "session": session,
            "env": {os.fsdecode(k): os.fsdecode(v) for k, v in (env or os.environ).items()},
        }
        if server is None:  # a command that starts one
            self.pid = os.fork()
            if self.pid == 0:
                run(**job, files=files)
        else:
            socket.send_fds(server, [json.dumps(job).encode()], files)
            self.pid = int(server.recv(20))
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(command, cwd, session, env, files):
    """Be a new interpreter's process, and end."""
    status = 1
    try:
        files = [os.dup(file) for file in files]
        for own, file in enumerate(files):
            os.dup2(file, own)
        os.closerange(3, 1 << 16)
        modes = enumerate(("r", "w", "w"))
        streams = [os.fdopen(own, mode, buffering=1, closefd=False) for own, mode in modes]
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.resetwarnings()
        if session:
            os.setsid()
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        read_again()
        # torch replaces its thread pool at the first use after a fork, and two threads that do so
        # at once find none ("Invalid thread pool!"): as transformers' threads that load weights.
        torch.set_num_threads(torch.get_num_threads())
        status = execute([a for a in command if a not in OPTIONS])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def read_again():
    """Set again the values that modules read from the environment when they were imported."""
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    code = transformers.dynamic_module_utils
    code.HF_MODULES_CACHE = os.environ.get("HF_MODULES_CACHE", code.HF_MODULES_CACHE)
    hub = huggingface_hub.constants
    hub.ENDPOINT = os.environ.get("HF_ENDPOINT", hub.ENDPOINT)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET"):
        setattr(hub, name, os.environ.get(name, str(int(getattr(hub, name)))) == "1")
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    rank_zero_only.rank = next((int(rank) for rank in ranks if rank is not None), 0)
    subprocess.Popen = Forked  # for the commands that it starts
    if torchrun := sys.modules.get("torch.distributed.elastic.multiprocessing.subprocess_handler"):
        sys.modules[torchrun.SubprocessHandler.__module__].Popen = Forked


def execute(command):
    """Run `-m module ...` or `script ...`; the status."""
    module = command[0] == "-m"
    copied = Path.cwd() != ROOT and any(Path(name, "__init__.py").is_file() for name in OURS)
    if not module or copied:  # a program of its own, or a copy of the project
        for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
            del sys.modules[name]
    try:
        if module:
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0
