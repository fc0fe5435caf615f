//! `bifolio mount`: replaces this process by `bifolio-mount`, a program with heavier dependencies
//! that is built separately.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

/// Name of the program.
const PROGRAM: &str = "bifolio-mount";

/// Runs the program beside this one, or the one on `PATH`. Returns only if it cannot be started.
pub(crate) fn run(arguments: &[OsString]) -> anyhow::Result<()> {
    let beside = std::env::current_exe().ok().map(|this| this.with_file_name(PROGRAM));
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(program).args(arguments).exec();
    Err(error).context(
        "cannot start bifolio-mount, which is built with `cargo build --release --manifest-path \
         doors/Cargo.toml -p bifolio-mount`",
    )
}
