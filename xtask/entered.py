#!/usr/bin/env python3
"""Lists the files of the library that three calls enter: a hit, a miss, and a sync of one page.

Run by hand: `xtask/entered.py` needs gdb and takes a few minutes. It builds a small program without
optimizations and debug assertions, steps through each call one instruction at a time, in the thread
that made it, and notes the source file of each instruction. Inlined functions count. What other
threads do is not seen.
"""

import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARY = "crates/bifolio/src/"
CALLS = ("hit", "miss", "sync")

PROGRAM = """
use bifolio::{Cache, File, OpenOptions};

#[inline(never)]
fn entered_hit(file: &File, buffer: &mut [u8]) {
    file.read_exact_at(buffer, 0).unwrap();
}

#[inline(never)]
fn entered_miss(file: &File, buffer: &mut [u8]) {
    file.read_exact_at(buffer, 1 << 20).unwrap();
}

#[inline(never)]
fn entered_sync(file: &File, _: &mut [u8]) {
    file.sync_data().unwrap();
}

fn main() {
    let path = std::env::args().nth(1).unwrap();
    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let file = cache.open(&path, &OpenOptions::new().write(true)).unwrap();
    let mut buffer = [0; 4096];
    // The stock of the CPU gets frames, and the page of the hit its mark.
    for position in [0, 6 << 20, 3 << 20, 0, 0] {
        file.read_exact_at(&mut buffer, position).unwrap();
    }
    entered_hit(&file, &mut buffer);
    entered_miss(&file, &mut buffer);
    // The first sync of a file does more.
    for page in 0..2 {
        file.write_all_at(&buffer, page << 20).unwrap();
        if page == 0 {
            file.sync_data().unwrap();
        }
    }
    entered_sync(&file, &mut buffer);
}
"""

MANIFEST = """
[package]
name = "entered"
edition = "2024"
[dependencies]
bifolio = {{ path = "{root}/crates/bifolio" }}
[profile.dev]
debug-assertions = false
overflow-checks = false
[workspace]
"""


def step_through(gdb):
    """Runs in gdb: prints a line for each call, with its files."""
    gdb.execute("set pagination off")
    gdb.execute("set confirm off")
    gdb.execute("set auto-load no")
    for call in CALLS:
        gdb.execute(f"break entered::entered_{call}", to_string=True)
    gdb.execute("run", to_string=True)
    for call in CALLS:
        caller = gdb.selected_frame().older()
        back, stack = caller.pc(), int(gdb.parse_and_eval("$sp"))
        steps, seen = 0, {}
        while True:
            gdb.execute("stepi", to_string=True)
            steps += 1
            pc = gdb.selected_frame().pc()
            if pc == back and int(gdb.parse_and_eval("$sp")) > stack:
                break
            if pc not in seen:
                symtab = gdb.find_pc_line(pc).symtab
                seen[pc] = symtab.fullname() if symtab else ""
        names = {name.split(LIBRARY)[1] for name in seen.values() if LIBRARY in name}
        print(f"ENTERED {call} {steps} {' '.join(sorted(names))}", flush=True)
        if call != CALLS[-1]:
            gdb.execute("continue", to_string=True)
    gdb.execute("kill")


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(f"{folder}/src")
        for name, text in (("src/main.rs", PROGRAM), ("Cargo.toml", MANIFEST.format(root=ROOT))):
            with open(f"{folder}/{name}", "w") as file:
                file.write(text)
        with open(f"{ROOT}/Cargo.lock") as lock, open(f"{folder}/Cargo.lock", "w") as copy:
            copy.write(lock.read())
        target = f"{ROOT}/target/entered"
        build = ["cargo", "build", "--offline", "--quiet", "--target-dir", target]
        subprocess.run(build, cwd=folder, check=True)
        script = ["gdb", "-nx", "-batch", "-x", os.path.abspath(__file__), "--args"]
        script += [f"{target}/debug/entered", f"{folder}/data"]
        shown = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True).stdout
    entered = [line.split()[1:] for line in shown.splitlines() if line.startswith("ENTERED ")]
    if [call for call, *_ in entered] != list(CALLS):
        sys.exit(f"gdb did not step through all calls:\n{shown}")
    for call, steps, *names in entered:
        folders = {name.split("/")[0] for name in names if "/" in name}
        print(f"{call}: {len(names)} files of {len(folders)} folders, {steps} instructions")
        for name in names:
            print(f"  {name}")


if __name__ == "__main__":
    try:
        import gdb as debugger
    except ImportError:
        main()
    else:
        step_through(debugger)
