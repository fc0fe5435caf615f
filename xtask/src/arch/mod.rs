//! `cargo x check-arch aarch64`: the tests of the library on a processor of another kind, emulated.
//!
//! Called by `main`, never by `cargo x ci`. On two CPUs that other work shares, the build took 6
//! minutes, the system 1, and of the tests `lib` 1.5, `advice` 1 and `memory_files` 5; those that
//! fault much take far longer than an hour. `--user` runs the programs under QEMU's user mode
//! instead, where io_uring and userfaultfd are missing, which tests the fallbacks.
//!
//! ```text
//!  cargo (cross) --> test programs, torture, bifolio
//!                        |        --user: qemu-aarch64 PROGRAM
//!  Debian's packages --> image.rs: root file system on a virtio disk, kernel, initial RAM disk
//!                        |
//!                    qemu-system-aarch64: check.sh runs each program, and the console tells how
//! ```
//!
//! An x86-64 machine that emulates keeps its own, stronger order of memory: what this cannot show
//! is a missing barrier. Loom looks for those.

mod image;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde_json::Value;

use crate::cargo::{self, target_folder, workspace_root};
use crate::{process, ran};

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Debian's packages with what is used here, on the machine that emulates.
const PACKAGES: [&str; 8] = [
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "qemu-user",
    "qemu-system-arm",
    "mmdebstrap",
    "e2fsprogs",
    "kmod",
    "xz-utils",
];
/// Programs of theirs: the packages are installed if one is missing.
const PROGRAMS: [&str; 7] = [
    "aarch64-linux-gnu-gcc",
    "qemu-aarch64",
    "qemu-system-aarch64",
    "mmdebstrap",
    "mkfs.ext4",
    "depmod",
    "xz",
];
/// The last line on the console of a system in which all programs succeeded.
const END: &str = "check-arch: all passed";

/// Options of `cargo x check-arch`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The processor.
    processor: Processor,
    /// Run the programs under QEMU's user mode instead of in an emulated system.
    #[arg(long)]
    user: bool,
    /// Size of the kernel's pages, KiB: with 16, the library must refuse to build a cache.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(4..=16))]
    pages: u32,
    /// Seconds of torture after the tests; 0 leaves it out.
    #[arg(long, default_value_t = 60)]
    torture: u32,
    /// Only these test programs: `lib`, `maps`, `writes` ..., with commas between.
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Arguments for the test programs, after `--`: filters, `--skip` ...
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// A processor that QEMU emulates.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Processor {
    /// 64-bit ARM.
    Aarch64,
}

/// A program for the other processor.
pub struct Program {
    pub name: String,
    pub path: PathBuf,
}

/// Installs what is missing, builds the programs and runs them.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Processor::Aarch64 = arguments.processor;
    install()?;
    let mut tests = build(&["test", "--no-run", "-p", "bifolio", "--lib", "--tests"])?;
    tests.retain(|test| arguments.only.is_empty() || arguments.only.contains(&test.name));
    // Faults are the slowest of all that is emulated.
    tests.sort_by_key(|test| test.name == "maps");
    ensure!(!tests.is_empty(), "there is no such test program");
    let others = build(&["build", "-p", "bifolio-cli", "-p", "bifolio-torture"])?;
    let mut lines: Vec<String> = tests
        .iter()
        .map(|test| format!("{} --test-threads=2 {}", test.name, arguments.arguments.join(" ")))
        .collect();
    lines.push("bifolio check checked".to_owned());
    if arguments.torture > 0 {
        // Under the user mode, a program cannot start itself again to be killed.
        let without = if arguments.user { " --without kills" } else { "" };
        lines.push(format!("bifolio-torture --seconds {}{without}", arguments.torture));
    }
    if arguments.pages == 16 {
        // No test can pass: the refusal is what is checked.
        let error = "its pages have 16384 bytes";
        lines = vec![format!("bifolio check checked 2>&1 | busybox grep \"{error}\"")];
    }
    let programs: Vec<Program> = tests.into_iter().chain(others).collect();
    let printed = if arguments.user {
        under_user_mode(&programs, &lines)?
    } else {
        in_a_system(arguments, &programs, &lines)?
    };
    if arguments.pages == 16 { Ok(()) } else { ran::check_tests(&printed) }
}

/// Installs Debian's packages and the standard library for the other processor.
fn install() -> Result<()> {
    let has = |program: &&str| {
        std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|it| it.join(program).exists()))
    };
    if !PROGRAMS.iter().all(|program| has(program) || Path::new("/sbin").join(program).exists()) {
        process::run(Command::new("apt-get").arg("update"))?;
        let arguments = ["install", "-y", "--no-install-recommends"];
        process::run(Command::new("apt-get").args(arguments).args(PACKAGES))?;
    }
    process::run(Command::new("rustup").args(["target", "add", TARGET]))
}

/// Runs cargo for the other processor, and returns the programs that it built.
///
/// The profile is that of torture, with the assertions of a debug build: without optimization, an
/// emulated program would take hours.
fn build(arguments: &[&str]) -> Result<Vec<Program>> {
    let mut command = Command::new(cargo::program());
    command.args(arguments).args(["--profile", "checks", "--target", TARGET]);
    command.args(["--message-format", "json-render-diagnostics"]);
    command.args(["--config", "profile.checks.debug-assertions=true"]);
    command.arg("--target-dir").arg(folder()).current_dir(workspace_root());
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
    eprintln!("$ cargo {} --profile checks --target {TARGET}", arguments.join(" "));
    let text = process::output(&mut command).context("the build failed")?;
    let mut programs = Vec::new();
    for line in text.lines() {
        let message: Value = serde_json::from_str(line).context("a message of cargo")?;
        let Some(path) = message["executable"].as_str() else { continue };
        let target = &message["target"];
        let name = target["name"].as_str().context("a program without a name")?;
        let is_lib = target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"lib".into()));
        let name = if is_lib { "lib" } else { name };
        programs.push(Program { name: name.to_owned(), path: path.into() });
    }
    Ok(programs)
}

/// Folder of the builds and of the system.
fn folder() -> PathBuf {
    target_folder().join("aarch64")
}

/// Runs the programs as processes of this machine; returns what they print.
fn under_user_mode(programs: &[Program], lines: &[String]) -> Result<String> {
    let folder = folder().join("user");
    image::fill(&folder, programs, lines)?;
    // Programs that the tests start run under QEMU, too.
    let qemu = "qemu-aarch64 -L /usr/aarch64-linux-gnu";
    let mut command = Command::new("sh");
    process::run_and_read(command.arg("check.sh").current_dir(&folder).env("RUN", qemu))
}

/// Runs the programs in a system of Debian's; returns what its console shows.
fn in_a_system(arguments: &Arguments, programs: &[Program], lines: &[String]) -> Result<String> {
    let system = image::make(
        &folder().join(format!("system-{}", arguments.pages)),
        arguments.pages,
        programs,
        lines,
    )?;
    let mut command = Command::new("qemu-system-aarch64");
    command.args(["-machine", "virt", "-cpu", "cortex-a76", "-smp", "2", "-m", "4096"]);
    command.args(["-accel", "tcg,thread=multi", "-nographic", "-no-reboot", "-nic", "none"]);
    command.args(["-append", "console=ttyAMA0 quiet panic=-1"]);
    command.arg("-kernel").arg(&system.kernel).arg("-initrd").arg(&system.initial);
    let disk = format!("file={},if=none,id=disk,format=raw,cache=none", system.disk.display());
    command.args(["-drive", &disk, "-device", "virtio-blk-pci,drive=disk"]);
    eprintln!("$ {}", format!("{command:?}").replace('"', ""));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start qemu-system-aarch64")?;
    let console = child.stdout.take().context("the emulator has no console")?;
    let (mut has_passed, mut printed) = (false, String::new());
    for line in BufReader::new(console).split(b'\n') {
        let line = line.context("the console of the emulator")?;
        let line = String::from_utf8_lossy(&line);
        println!("{}", line.trim_end());
        printed += line.trim_end();
        printed.push('\n');
        has_passed |= line.trim_end() == END;
    }
    ensure!(child.wait()?.success(), "the emulator failed");
    if !has_passed {
        bail!("not all programs succeeded: see the lines that begin with `check-arch: FAILED`");
    }
    Ok(printed)
}
