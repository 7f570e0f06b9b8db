# SPDX-License-Identifier: Apache-2.0
"""A core smoke test on another kernel: Debian's 6.1 cloud kernel, emulated by qemu (tcg), without network.

The initramfs holds busybox, PostgreSQL, the pooler with the libraries they need, and the script guest.sh. It proves
that things work there, never how fast.
"""

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))

from upkit import host, pooler, report

BOOT_TIMEOUT_S = 600  # software emulation: initdb alone takes half a minute on a busy machine
MEMORY_MIB = 1536
PROGRAMS = ("initdb", "postgres", "psql", "pgbench", "pg_ctl")


def need(program, package):
    """Path of a program of this machine."""
    path = shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if not path:
        raise host.SetupError(f"{program} not found: apt-get install {package}")
    return path


def kernel():
    """Path of the kernel image, from the package that linux-image-cloud-amd64 depends on; fetched once."""
    directory = host.cache_dir("kernel")
    found = glob.glob(os.path.join(directory, "boot", "vmlinuz-*"))
    if not found:
        shown = run("apt-cache", "depends", "linux-image-cloud-amd64")
        package = re.search(r"Depends: (linux-image-\S+)", shown)
        if not package:
            raise host.SetupError("linux-image-cloud-amd64 is unknown: apt-get update")
        run("apt-get", "-o", "APT::Sandbox::User=root", "download", package[1], cwd=directory)
        run("dpkg", "-x", glob.glob(os.path.join(directory, "*.deb"))[0], directory)
        found = glob.glob(os.path.join(directory, "boot", "vmlinuz-*"))
    return found[0]


def run(*args, **kwargs):
    """Runs a step; its output, or SetupError with what it said."""
    done = subprocess.run(args, capture_output=True, text=True, check=False, **kwargs)
    if done.returncode:
        raise host.SetupError(f"{' '.join(args)}: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


def libraries(path):
    """Shared libraries that a program or library is linked with."""
    done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
    return re.findall(r"(?:=> |^\s*)(/\S+) \(", done.stdout, re.MULTILINE)


class Image:
    """The initramfs under construction."""

    def __init__(self, root):
        self.root = root
        for directory in ("bin", "dev", "proc", "sys", "tmp", "etc", "run", "var/tmp", "srv", "sys/fs/bpf"):
            os.makedirs(os.path.join(root, directory), exist_ok=True)

    def write(self, name, text, mode=0o644):
        """A file of the guest."""
        path = os.path.join(self.root, name)
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(path, mode)

    def copy(self, source, target=None):
        """Copies a program or library with what it is linked with, to the same path in the guest."""
        path = os.path.join(self.root, (target or source).lstrip("/"))
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.copy(os.path.realpath(source), path)
            for library in libraries(source):
                self.copy(library)

    def copy_tree(self, source):
        """Copies a directory to the same path."""
        shutil.copytree(source, os.path.join(self.root, source.lstrip("/")), dirs_exist_ok=True)

    def pack(self, file):
        """Writes the compressed archive. Owner root whoever we are."""
        with open(file, "wb") as out:
            find = subprocess.Popen(["find", ".", "-print0"], cwd=self.root, stdout=subprocess.PIPE)
            cpio = subprocess.Popen(["cpio", "--null", "-o", "-H", "newc", "-R", "0:0", "--quiet"], cwd=self.root,
                                    stdin=find.stdout, stdout=subprocess.PIPE)
            subprocess.run(["gzip", "-1"], stdin=cpio.stdout, stdout=out, check=True)
            if cpio.wait() or find.wait():
                raise host.SetupError("cpio failed")


def build(root, which):
    """Fills the guest's root file system."""
    image = Image(root)
    image.copy(need("busybox", "busybox-static"), "/bin/busybox")
    os.symlink("busybox", os.path.join(root, "bin/sh"))
    bin_dir = host.pg_bin().rstrip("/")
    for program in PROGRAMS:
        image.copy(os.path.join(bin_dir, program))
    for library in ("plpgsql.so", "dict_snowball.so"):
        image.copy(os.path.join(os.path.dirname(bin_dir), "lib", library))
    major = bin_dir.split("/")[-2]
    image.copy_tree(f"/usr/share/postgresql/{major}")
    if os.path.isdir("/usr/share/zoneinfo"):
        image.copy("/usr/share/zoneinfo/Etc/UTC")
    argv = pooler.command(which)
    image.copy(argv[0], "/bin/pooler")
    image.write("etc/passwd", "root:x:0:0::/:/bin/sh\npostgres:x:100:100::/srv:/bin/sh\n")
    image.write("etc/group", "root:x:0:\npostgres:x:100:\n")
    image.write("etc/hosts", "127.0.0.1 localhost\n")
    image.write("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n")
    common = ("[databases]\nbench = host=127.0.0.1 port=5432 dbname=postgres user=postgres\n[pgbouncer]\n"
              "listen_addr = 127.0.0.1\nauth_type = any\nadmin_users = postgres\npool_mode = transaction\n"
              "default_pool_size = 4\nserver_tls_sslmode = disable\n")
    image.write("srv/pooler.ini", common + "listen_port = 6432\nunix_socket_dir = /tmp\nlogfile = /tmp/pooler.log\n")
    image.write("srv/lanes.ini", common + "listen_port = 6433\nunix_socket_dir =\nlogfile = /tmp/lanes.log\n"
                "[underpass]\nkernel_path = require\nsame_host = off\n")
    # Lane A needs 6.2: what asks for it must not start here.
    image.write("srv/local.ini", common + "listen_port = 6434\nunix_socket_dir =\nlogfile = /tmp/local.log\n"
                "[underpass]\nkernel_path = require\n")
    for library in glob.glob("/lib/x86_64-linux-gnu/libnss_files*"):
        image.copy(library)
    with open(os.path.join(HERE, "guest.sh"), encoding="utf-8") as script:
        text = script.read().replace("@PG_BIN@", bin_dir).replace("@POOLER@", " ".join(["/bin/pooler", *argv[1:]]))
        image.write("init", text.replace("@KIND@", which), 0o755)


def main():
    parser = argparse.ArgumentParser(prog="tests/kernels/run.sh", description=__doc__)
    parser.add_argument("-o", metavar="FILE", help="results as JSON lines")
    parser.add_argument("-v", action="store_true", help="print the guest's console")
    options = parser.parse_args()
    which = pooler.kind()
    label = pooler.label(which)
    qemu = need("qemu-system-x86_64", "qemu-system-x86")
    need("cpio", "cpio")
    results = report.Report("kernels", label, None, options.o, options.v)
    image = kernel()
    with tempfile.TemporaryDirectory(prefix="up-kernel-", dir="/tmp") as directory:
        root, archive = os.path.join(directory, "root"), os.path.join(directory, "initramfs")
        os.mkdir(root)
        build(root, which)
        Image(root).pack(archive)
        try:
            done = subprocess.run(
                [qemu, "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MIB), "-nographic", "-no-reboot",
                 "-nic", "none", "-kernel", image, "-initrd", archive, "-append", "console=ttyS0 quiet panic=-1 rdinit=/init"],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_TIMEOUT_S, check=False)
            console = done.stdout.decode("utf-8", "replace")
        except subprocess.TimeoutExpired as error:
            console = (error.stdout or b"").decode("utf-8", "replace") + f"\nno end in {BOOT_TIMEOUT_S} s"
    if options.v:
        print(console)
    for line in console.splitlines():
        found = re.search(r"@@(\S+) (ok|fail) ?(.*)", line)
        if found:
            results.add(f"6.1/{found[1]}", None if found[2] == "ok" else found[3] or "failed")
        elif "@@note " in line:
            print(line.split("@@note ", 1)[1].strip())
    if "@@end" not in console:
        results.add("6.1/ends", console.strip()[-1500:])
    return results.finish()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except host.SetupError as error:
        print(error, file=sys.stderr)
        print("0 passed, 1 failed")
        sys.exit(1)
